"""Looking ahead: what is foreseen is what the source rule decides, and its parts are those of the costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.forecast import RUNNING_MS
from epp.core.outlook import MAX_HOLDERS, Outlook
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.source_selector import SourceProducer, SourceSelector
from epp.core.thresholds import MODE_COST, MODE_THRESHOLD, PullSettings, everywhere
from epp.core.types import Candidate, ClaimState, InflightLoad, SchedulingRequest
from tests.unit.core.rows import BLOCK, candidate, info

PROMPT_TOKENS = 8_000
RECOMPUTE = RecomputeCurve(20.0, 50.0)  # 50 ms a thousand tokens
PULL = PullCurve(50.0, 2.0, 2_000.0)  # 30 ms beside the step, 2 ms a thousand tokens
REQUEST = SchedulingRequest("r", "m", range(PROMPT_TOKENS))


def selector(mode: str = MODE_COST, delta: int = 1_024, **changed: object) -> SourceSelector:
    made = SourceSelector(SourceProducer(None))
    values = {"mode": mode, "recompute_seed": RECOMPUTE, "pull_seed": PULL} | changed
    made.set_thresholds(everywhere(PullSettings(min_cached_token_delta=delta, **values)))  # type: ignore[arg-type]
    return made


def row(pod: str, blocks: int = 0, *, queue_tokens: int = 0, **changed: object) -> Candidate:
    made = candidate(pod, blocks=blocks, engine=info(), **changed)  # type: ignore[arg-type]
    return made._replace(load=InflightLoad(made.load.requests, queue_tokens, made.load.pulls_served))


def test_the_parts_are_those_of_the_costs() -> None:
    holder, idle = row("a", 400, queue_tokens=4_000), row("b")
    outlook = Outlook(REQUEST, (holder, idle), selector(), 0.0)
    at_holder, at_idle = outlook.forecasts((holder, idle))
    assert at_holder is not None
    assert at_idle is not None
    assert (at_holder.queue_ms, at_holder.floor_ms, at_holder.source) == (pytest.approx(200.0), 20.0, None)
    assert at_holder.compute_ms == pytest.approx(50e-3 * (PROMPT_TOKENS - 400 * BLOCK))
    assert str(at_idle.source) == "a/0"
    assert at_idle.pull_ms == pytest.approx(30.0 + 2e-3 * 400 * BLOCK)
    assert at_idle.compute_ms == at_holder.compute_ms
    assert at_idle.total_ms < at_holder.total_ms
    assert outlook.found.keys() == {holder.endpoint.id, idle.endpoint.id}


def test_what_waits_and_runs_there_counts() -> None:
    busy = row("a", waiting=3.0, requests=1)  # two of the three are not ours
    (found,) = Outlook(REQUEST, (busy,), selector(), 0.0).forecasts((busy,))
    assert found is not None
    assert found.queue_ms == pytest.approx(2 * 50e-3 * PROMPT_TOKENS)
    assert found.busy_ms == pytest.approx(found.queue_ms + RUNNING_MS)


def test_the_cheaper_of_two_sources_is_meant() -> None:
    """Equals but for the pulls that one serves already: they share its link."""
    first, second, taker = row("a", 400, pulls=3), row("b", 400), row("c")
    outlook = Outlook(REQUEST, (first, second, taker), selector(), 0.0)
    found = outlook.forecast(taker)
    assert found is not None
    assert str(found.source) == "b/0"
    assert str(outlook.source_for(taker)) == "b/0"


@pytest.mark.parametrize(
    ("sources", "rows"),
    [
        (selector(recompute_seed=None), (row("a", 400), row("b"))),
        (selector(), (row("a", 400), row("b", state=ClaimState.UNKNOWN))),
    ],
    ids=["no costs", "unknown cache"],
)
def test_unknown_is_said(sources: SourceSelector, rows: tuple[Candidate, Candidate]) -> None:
    assert Outlook(REQUEST, rows, sources, 0.0).forecast(rows[1]) is None


def test_a_prompt_without_tokens_has_no_forecast() -> None:
    rows = (row("a", 400), row("b"))
    outlook = Outlook(SchedulingRequest("r", "m", None), rows, selector(), 0.0)
    assert (outlook.forecast(rows[1]), outlook.source_for(rows[1])) == (None, None)


def test_of_many_rows_only_those_that_may_win_are_priced() -> None:
    rows = [row("holder", 400), *(row(f"r{n:03d}", queue_tokens=1_000 * n) for n in range(200))]
    found = Outlook(REQUEST, rows, selector(), 0.0).forecasts(rows)
    assert all(f is not None for f in found)
    assert found[1] is not None
    assert str(found[1].source) == "holder/0"
    assert sum(f is not None and f.source is not None for f in found) < 60


ROWS = st.lists(
    st.builds(
        lambda n, blocks, cpu, tokens, pulls, wait, drain, seed: row(
            f"e{n}",
            blocks,
            queue_tokens=tokens,
            cpu=min(cpu, blocks),
            pulls=pulls,
            waiting=float(wait),
            draining=drain,
        )._replace(metrics=candidate("x", engine=info(seed_fp=seed), waiting=float(wait)).metrics),
        st.integers(0, 99),
        st.integers(0, 500),
        st.integers(0, 500),
        st.integers(0, 20_000),
        st.integers(0, 3),
        st.integers(0, 5),
        st.booleans(),
        st.sampled_from("ab"),
    ),
    min_size=2,
    max_size=MAX_HOLDERS,
    unique_by=lambda r: r.endpoint.id,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from([MODE_COST, MODE_THRESHOLD]), st.integers(1, 4_000), st.integers(1, 3))
def test_what_is_foreseen_is_what_the_rule_decides(
    rows: list[Candidate], mode: str, delta: int, limit: int
) -> None:
    """For every endpoint: told to name nobody but the source that was foreseen, the rule names it; where none
    was foreseen, it names nobody, whoever is sampled."""
    sources = selector(mode, delta, max_inflight_pulls=limit)
    rows.sort(key=lambda r: r.endpoint.id)
    outlook = Outlook(REQUEST, rows, sources, 0.0)
    for computing in rows:
        found, meant = outlook.forecast(computing), outlook.source_for(computing)
        assert found is not None
        assert (found.source is None) == (meant is None)
        choice = sources.choose(REQUEST, rows, computing, frozenset(), 0.0, found.source)
        named = choice.source.endpoint.id if choice.source else None
        if found.source is not None:
            assert named == found.source
        else:
            assert named is None
        assert found.total_ms >= 0.0
