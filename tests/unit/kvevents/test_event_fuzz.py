"""A short form of `benchmarks.fuzz_events`, with the pure index beside the compiled one."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.event_inputs import EventInputs
from benchmarks.fuzz_events import CHECK_EVERY, Fuzz
from epp.core.index_choice import COMPILED, available_indexes

pytestmark = pytest.mark.skipif(
    COMPILED not in available_indexes(), reason="the compiled index is not built here"
)


@pytest.mark.parametrize("seed", [11, 12])
def test_hostile_batches_get_the_same_verdict_and_leave_the_same_index(seed: int) -> None:
    fuzz = Fuzz(with_pure=True)
    for number, payload in enumerate(islice(EventInputs(seed), 2_500), 1):
        fuzz.feed(payload)
        if number % CHECK_EVERY == 0:
            fuzz.check()
            fuzz.renew(number)
    fuzz.check()
    fuzz.drain()
    figures = fuzz.figures
    # the inputs are worth something: both ways of every decision are taken often
    assert 500 < figures.accepted < 2_000
    assert min(figures.packed_events, figures.other_events, figures.stored_blocks) > 100
    assert figures.removed_blocks > 50
    assert figures.windowed_blocks > 100
    assert figures.found_blocks > 0  # some endpoint can be asked although its groups limit it
