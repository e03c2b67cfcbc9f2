"""Formulas of the scorers by load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.core.types import InflightLoad
from epp.plugins.scorers import ActiveRequestScorer, LoadAwareScorer, RunningRequestsScorer, TokenLoadScorer
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, loaded


def test_token_load_is_a_share_of_its_threshold() -> None:
    rows = [loaded("a"), loaded("b", tokens=250), loaded("c", tokens=1000), loaded("d", tokens=5000)]
    assert TokenLoadScorer("s", 1000).score(asked(tokens=0), rows) == [1.0, 0.75, 0.0, 0.0]


def test_token_load_counts_what_the_request_itself_would_add() -> None:
    """Found by the simulator: without it token-aware placement leaves the holder of a 48K prompt."""
    request = asked(tokens=600)
    holder = candidate("a", blocks=30)  # of 16 tokens
    busy_holder = holder._replace(load=InflightLoad(1, 700, 0))
    stranger = candidate("b")
    scores = TokenLoadScorer("s", 1000).score(request, [holder, busy_holder, stranger])
    assert scores == pytest.approx([1 - 0.12, 1 - 0.82, 1 - 0.6])


def test_estimated_output_counts_as_load() -> None:
    row = candidate("a")._replace(load=InflightLoad(1, 200, 0, output_tokens=300))
    assert TokenLoadScorer("s", 1000).score(asked(tokens=0), [row]) == [0.5]


def test_load_aware_never_says_more_than_a_half() -> None:
    rows = [candidate(p, waiting=w) for p, w in (("a", 0), ("b", 32), ("c", 128), ("d", 1000))]
    assert LoadAwareScorer("s").score(asked(), rows) == [0.5, 0.375, 0.0, 0.0]


def test_running_requests_rank_between_least_and_most() -> None:
    rows = [candidate(p) for p in "abc"]
    rows = [
        row._replace(metrics=replace(row.metrics, running_requests=n))
        for row, n in zip(rows, (2.0, 6.0, 10.0), strict=True)
    ]
    assert RunningRequestsScorer("s").score(asked(), rows) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("requests", [[0, 0], [3, 3]])
def test_equal_load_is_scored_alike(requests: list[int]) -> None:
    rows = [loaded(f"e{n}", requests=n_requests) for n, n_requests in enumerate(requests)]
    first, second = ActiveRequestScorer("s").score(asked(), rows)
    assert first == second
