"""Times of output on a clock that the test moves."""

from __future__ import annotations

import pytest

from epp.core.types import GAP_BOUNDS_S, Outcome
from epp.extproc.output_clock import OutputClock


def test_first_token_and_gaps() -> None:
    clock = OutputClock()
    for now_s in (10.0, 10.0005, 10.01, 30.01):
        clock.note(now_s)
    timed = clock.timed(Outcome(status=200), started_s=9.0)
    assert timed.ttft_s == 1.0
    assert timed.output is not None
    assert timed.output.first_to_last_s == pytest.approx(20.01)
    counts = dict(zip((*GAP_BOUNDS_S, None), timed.output.gap_counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.001: 1, 0.01: 1, None: 1}


def test_one_piece_has_no_gap_and_no_piece_no_time() -> None:
    clock = OutputClock()
    assert clock.timed(Outcome(status=200), started_s=1.0) == Outcome(status=200)
    clock.note(3.0)
    assert clock.timed(Outcome(), started_s=1.0) == Outcome(ttft_s=2.0)
