"""The compiled columns and the Python ones give equal answers, rows of the same types among them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.identity import EndpointId
from epp.core import pure_columns as pure
from epp.core.index_interface import Depths
from epp.core.types import NO_LOAD, UNKNOWN_METRICS, Candidate, ClaimState, Endpoint, PrefixMatch
from epp.core.view_state import Standing

compiled = pytest.importorskip("epp.core._compiled_columns", reason="not built here")

BLOCKS = st.integers(0, 5_000)
STANDINGS = st.builds(
    Standing, st.none() | st.sampled_from(ClaimState), st.integers(0, 64), st.booleans(), st.booleans()
)
MATCHES = st.builds(
    PrefixMatch,
    st.sampled_from(ClaimState),
    BLOCKS,
    BLOCKS,
    BLOCKS,
    st.integers(0, 64),
    st.booleans(),
    BLOCKS,
)
SCORES = st.floats(-2.0, 2.0) | st.sampled_from((math.nan, math.inf, -math.inf, 0.0, 1.0, -0.0))


def name(number: int) -> EndpointId:
    return EndpointId(f"pod-{number}")


@given(st.lists(STANDINGS, max_size=12), st.data())
def test_match_rows(standings: list[Standing], data: st.DataObject) -> None:
    endpoints = [name(number) for number in range(len(standings))]
    some = st.dictionaries(st.sampled_from([*endpoints, name(99)]), st.builds(Depths, BLOCKS, BLOCKS, BLOCKS))
    expected = st.dictionaries(st.sampled_from([*endpoints, name(99)]), BLOCKS)
    arguments = (endpoints, standings, data.draw(some), data.draw(expected))
    found, wanted = compiled.match_rows(*arguments), pure.match_rows(*arguments)
    assert list(found.items()) == list(wanted.items())
    assert all(type(match) is PrefixMatch for match in found.values())


@given(st.lists(MATCHES, max_size=12), st.booleans())
def test_candidate_rows_and_servable_tokens(matches: list[PrefixMatch], placed: bool) -> None:
    endpoints = [Endpoint(name(number), "10.0.0.1", number) for number in range(len(matches))]
    metrics, loads = [UNKNOWN_METRICS] * len(matches), [NO_LOAD] * len(matches)
    guesses = matches[::-1] if placed else None
    rows = compiled.candidate_rows(endpoints, metrics, loads, matches, guesses)
    assert rows == pure.candidate_rows(endpoints, metrics, loads, matches, guesses)
    assert all(
        type(row) is Candidate and row.match is match for row, match in zip(rows, matches, strict=True)
    )
    assert compiled.servable_tokens(rows) == pure.servable_tokens(rows)
    assert pure.servable_tokens(rows) == [match.servable_tokens for match in matches]


@given(st.lists(MATCHES, max_size=12), st.integers(0, 100_000), st.floats(0, 2), st.floats(0, 2))
def test_matched_shares(matches: list[PrefixMatch], tokens: int, device: float, cpu: float) -> None:
    assert compiled.matched_shares(matches, tokens, device, cpu) == pure.matched_shares(
        matches, tokens, device, cpu
    )


@given(st.lists(st.tuples(SCORES, st.floats(-100, 100)), min_size=1, max_size=12), st.floats(0, 10))
def test_add_weighted(rows: list[tuple[float, float]], weight: float) -> None:
    scores, totals = [score for score, _ in rows], [total for _, total in rows]
    given_scores = list(scores)
    found = compiled.add_weighted(totals, scores, weight)
    assert found == pure.add_weighted(totals, scores, weight)
    assert all(0.0 <= score <= 1.0 for score in found[0])
    assert [math.isnan(score) for score in scores] == [math.isnan(score) for score in given_scores]


@given(st.lists(st.integers(0, 5) | st.floats(-3, 3), max_size=30), st.integers(0, 12))
def test_largest(values: list[float], count: int) -> None:
    found = compiled.largest(values, count)
    assert found == pure.largest(values, count)
    assert [values[i] for i in found] == sorted(values, reverse=True)[:count]


@given(st.lists(st.tuples(MATCHES, st.integers(0, 40)), max_size=12), st.integers(0, 45))
def test_within_reach(rows: list[tuple[PrefixMatch, int]], best: int) -> None:
    candidates = [Candidate(Endpoint(name(0), "10.0.0.1", 1), match=match) for match, _ in rows]
    depths = [depth for _, depth in rows]
    assert compiled.within_reach(candidates, depths, best) == pure.within_reach(candidates, depths, best)


def test_scores_that_are_good_are_handed_on_as_they_are() -> None:
    scores = [0.25, 1.0]
    for columns in (pure, compiled):
        assert columns.add_weighted([1.0, 2.0], scores, 2.0) == ([0.25, 1.0], [1.5, 4.0])
        assert columns.add_weighted([1.0, 2.0], scores, 2.0)[0] is scores


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.servable_tokens([("not", "a", "row")]),
        lambda c: c.servable_tokens([7]),
        lambda c: c.matched_shares([(1, 2)], 3, 1.0, 1.0),
        lambda c: c.match_rows([name(0)], [(None,)], {}, {}),
        lambda c: c.match_rows([name(0)], [Standing(ClaimState.LIVE, 1, True, True)], {name(0): (1, 2)}, {}),
    ],
)
def test_rows_of_another_kind_are_an_error(call: object) -> None:
    assert callable(call)
    with pytest.raises(TypeError):
        call(compiled)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.add_weighted([0.0], [0.5, 0.5], 1.0),
        lambda c: c.match_rows([name(0)], [], {}, {}),
        lambda c: c.within_reach([], [1], 1),
        lambda c: c.candidate_rows([1, 2], [1], [1, 2], [1, 2], None),
    ],
)
def test_columns_of_other_lengths_are_an_error(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="differ"):
        call(compiled)
