"""Profiles, scorers and handlers: unknown is neither idle nor absent; ties spread; roles hold."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.disagg import DisaggProfileHandler, SingleProfileHandler
from epp.core.errors import NoEndpoints
from epp.core.scheduler import Profile, run_profile
from epp.core.types import Candidate, ClaimState
from epp.plugins.deciders import AlwaysDisaggDecider, PrefixBasedDecider
from epp.plugins.filters import decode_filter, prefill_filter
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    QueueScorer,
    TierWeights,
)
from tests.unit.core.rows import candidate, context, request

PICKER = MaxScorePicker("max-score-picker")
ALL = (
    QueueScorer("queue"),
    KvCacheUtilizationScorer("kv"),
    ActiveRequestScorer("active"),
    PrefixCacheScorer("prefix"),
)
metric = st.none() | st.floats(0, 1000)


@given(
    st.lists(
        st.tuples(metric, metric, st.integers(0, 256), st.sampled_from(ClaimState)), min_size=1, max_size=9
    )
)
def test_scores_are_finite_and_in_range(
    rows: list[tuple[float | None, float | None, int, ClaimState]],
) -> None:
    """S-D05."""
    candidates = [
        candidate(f"e{i}", waiting=w, usage=u, blocks=b, state=s) for i, (w, u, b, s) in enumerate(rows)
    ]
    for scorer in ALL:
        scores = scorer.score(context(), candidates)
        assert len(scores) == len(candidates)
        assert all(math.isfinite(s) and 0 <= s <= 1 for s in scores)


def test_an_endpoint_never_scraped_is_not_the_best_one() -> None:
    """S-D01: two loaded endpoints, one unknown: between them, not above."""
    scores = QueueScorer("q").score(
        context(), [candidate("a", waiting=4), candidate("b", waiting=8), candidate("c", waiting=None)]
    )
    assert scores == [1.0, 0.0, 0.5]
    assert KvCacheUtilizationScorer("k").score(
        context(), [candidate("a", usage=0.9), candidate("c", usage=None)]
    ) == pytest.approx([0.1, 0.1])


def test_no_claim_is_not_scored_as_empty() -> None:
    scores = PrefixCacheScorer("p").score(
        context(request(tokens=1600)),
        [candidate("a", blocks=100), candidate("b"), candidate("c", state=ClaimState.UNKNOWN)],
    )
    assert scores == [1.0, 0.0, 0.5]


def test_prefix_score_weighs_tiers_and_counts_whole_blocks() -> None:
    scorer = PrefixCacheScorer("p", TierWeights(device=1.0, cpu=0.5))
    rows = [candidate("a", blocks=10, device=4, cpu=10), candidate("b", blocks=10, device=10)]
    assert scorer.score(context(request(tokens=20 * 16 + 7)), rows) == [(4 + 3) / 20, 0.5]
    assert scorer.score(context(request(tokens=5)), rows) == [0.0, 0.0]  # shorter than a block


def test_queue_scores_equal_queues_alike() -> None:
    assert QueueScorer("q").score(context(), [candidate("a", waiting=3), candidate("b", waiting=3)]) == [1, 1]


def test_active_requests_idle_is_one_and_the_busiest_zero() -> None:
    rows = [candidate("a"), candidate("b", requests=1), candidate("c", requests=4)]
    assert ActiveRequestScorer("a").score(context(), rows) == [1.0, 0.75, 0.0]
    assert ActiveRequestScorer("a", 1, 0.5).score(context(), rows) == [1.0, 1.0, 0.0]


def test_ties_spread_over_requests_and_repeat_for_the_same_one() -> None:
    """S-D04."""
    profile = Profile("p", (), ((QueueScorer("q"), 1.0),), PICKER)
    rows = [candidate(p) for p in "abcd"]

    def pick(rid: str) -> str:
        return run_profile(profile, context(request(rid)), rows).winner.endpoint.id.pod

    picked = Counter(pick(f"r{i}") for i in range(400))
    assert set(picked) == set("abcd")
    assert max(picked.values()) < 160
    assert pick("same") == pick("same")


def test_the_highest_weighted_sum_wins_and_fallbacks_follow() -> None:
    profile = Profile(
        "p", (), ((QueueScorer("q"), 1.0), (PrefixCacheScorer("x"), 3.0)), MaxScorePicker("m", 2)
    )
    rows = [candidate("a", waiting=9, blocks=256), candidate("b", waiting=0), candidate("c", waiting=5)]
    result = run_profile(profile, context(), rows)
    assert [s.candidate.endpoint.id.pod for s in result.picked] == ["a", "b"]
    assert result.scored[0].parts == (("q", 0.0), ("x", 1.0))
    assert result.scored[0].score == 3.0


def test_a_filter_that_leaves_nobody_is_named() -> None:
    profile = Profile("prefill", (prefill_filter("prefill-filter"),), (), PICKER)
    with pytest.raises(NoEndpoints, match="prefill-filter left no endpoint"):
        run_profile(profile, context(), [candidate("a")])


@pytest.mark.parametrize(
    ("role", "decodes", "prefills"),
    [
        (None, True, False),
        ("decode", True, False),
        ("prefill", False, True),
        ("both", True, True),
        ("x", False, False),
    ],
)
def test_roles(role: str | None, decodes: bool, prefills: bool) -> None:
    rows = [candidate("a", role=role)]
    assert bool(decode_filter("d").filter(context(), rows)) == decodes
    assert bool(prefill_filter("p").filter(context(), rows)) == prefills


def pd_handler(decider: AlwaysDisaggDecider | PrefixBasedDecider) -> DisaggProfileHandler:
    return DisaggProfileHandler(
        Profile("decode", (decode_filter("d"),), ((PrefixCacheScorer("x"), 1.0),), PICKER),
        Profile("prefill", (prefill_filter("p"),), (), PICKER),
        decider,
    )


def pd_pool() -> list[Candidate]:
    return [candidate("p", role="prefill"), candidate("d", role="decode", blocks=10)]


def test_disagg_computes_on_the_prefill_endpoint() -> None:
    placement = pd_handler(AlwaysDisaggDecider("always")).place(context(), pd_pool())
    assert placement.primary.winner.endpoint.id.pod == "d"
    assert placement.computing.endpoint.id.pod == "p"


def test_one_pod_with_both_roles_is_not_split() -> None:
    placement = pd_handler(AlwaysDisaggDecider("always")).place(context(), [candidate("a", role="both")])
    assert placement.prefill is None
    assert placement.computing.endpoint.id.pod == "a"


def test_always_disagg_without_a_prefill_endpoint_fails_loudly() -> None:
    """S-D12: the configured choice is to split; it is not silently ignored."""
    with pytest.raises(NoEndpoints, match="prefill"):
        pd_handler(AlwaysDisaggDecider("always")).place(context(), [candidate("d", role="decode")])


@pytest.mark.parametrize(
    ("tokens", "threshold", "splits"),
    [(5, 1, True), (5, 6, False), (200, 40, True), (200, 41, False), (9, 0, False)],
)
def test_prefix_decider_compares_tokens(tokens: int, threshold: int, splits: bool) -> None:
    """S-B11: prompts shorter than a block follow the same rule."""
    decider = PrefixBasedDecider("d", non_cached_tokens=threshold)
    cached = 10 if tokens > 160 else 0
    placed = decider.wants_prefill(context(request(tokens=tokens)), candidate("d", blocks=cached))
    assert placed is splits


def test_single_profile_computes_where_it_serves() -> None:
    handler = SingleProfileHandler(Profile("default", (), (), PICKER))
    placement = handler.place(context(), [candidate("a")])
    assert placement.computing == placement.primary.winner
