"""Which settings apply to a request: precedence, specificity, shares of a limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.thresholds import (
    EVERYWHERE,
    PolicyTable,
    PullSettings,
    PullThresholds,
    ReplicaShare,
    Scope,
    everywhere,
)


def table(rules: dict[Scope, PullSettings], **changed: object) -> PolicyTable:
    return PolicyTable(1, configured=True, thresholds=PullThresholds(rules, 5), **changed)  # type: ignore[arg-type]


def delta(tokens: int) -> PullSettings:
    return PullSettings(min_cached_token_delta=tokens)


def test_the_most_specific_scope_wins_field_by_field() -> None:
    rules = {
        EVERYWHERE: PullSettings(min_cached_token_delta=10, max_inflight_pulls=4, require_verified=True),
        Scope(role="prefill"): delta(20),
        Scope(model="big"): delta(30),
        Scope(model="big", role="prefill"): PullSettings(enabled=False),
        Scope(source_class="far"): delta(15),
        Scope(model="big", source_class="far"): delta(90),
    }
    policies = table(rules)
    anybody = policies.policy_for("unheard-of", "decode")
    assert (anybody.min_cached_token_delta, anybody.max_inflight_pulls, anybody.generation) == (10, 4, 5)
    assert anybody.of_class("far").min_cached_token_delta == 15
    assert anybody.of_class("near") is anybody.of_class(None) is anybody
    assert policies.policy_for(None, "prefill").min_cached_token_delta == 20
    assert policies.policy_for(None, "prefill").of_class("far").min_cached_token_delta == 20, (
        "role outranks class"
    )
    big = policies.policy_for("big", "prefill")
    assert (big.min_cached_token_delta, big.enabled, big.require_verified) == (30, False, True)
    assert big.of_class("far").min_cached_token_delta == 90


def test_every_scope_outranks_those_that_say_less() -> None:
    """Model, role, class, from the right: the eight scopes are in one order."""
    scopes = [
        Scope(*(value if use else None for use, value in zip(bits, ("m", "r", "c"), strict=True)))
        for bits in itertools.product((False, True), repeat=3)
    ]
    for weaker, stronger in itertools.pairwise(scopes):
        thresholds = PullThresholds({weaker: delta(1), stronger: delta(2)})
        assert thresholds.settings_for(Scope("m", "r", "c")).min_cached_token_delta == 2


def test_documents_outrank_the_producer_and_nothing_outranks_its_absence() -> None:
    assert PolicyTable(7, configured=True).policy_for().min_cached_token_delta == 7
    assert table({EVERYWHERE: delta(9)}).policy_for().min_cached_token_delta == 9
    assert not PolicyTable(None, configured=True).policy_for().active
    assert not PolicyTable(None, configured=False, thresholds=everywhere(delta(9))).policy_for().active


def test_a_policy_is_looked_up_not_built() -> None:
    policies = table({Scope(model="m"): delta(3)})
    assert policies.policy_for("m", "r") is policies.policy_for("m", None)
    strangers = [policies.policy_for(f"client-made-{n}", None) for n in range(100)]
    assert all(policy is strangers[0] for policy in strangers)
    assert len(policies._memo) == 2, "what clients send does not fill it"


@given(st.integers(0, 100), st.integers(1, 9))
def test_the_shares_of_all_replicas_are_the_limit(limit: int, replicas: int) -> None:
    shares = [ReplicaShare(replicas, n).of(limit) for n in range(replicas)]
    assert sum(shares) == limit
    assert max(shares) - min(shares) <= 1


def test_a_share_reaches_the_policy() -> None:
    rules = {EVERYWHERE: PullSettings(max_inflight_pulls=5)}
    assert table(rules, share=ReplicaShare(2, 0)).policy_for().max_inflight_pulls == 3
    assert table(rules, share=ReplicaShare(2, 1)).policy_for().max_inflight_pulls == 2
    assert table({}).policy_for().max_inflight_pulls is None


@pytest.mark.parametrize(("replicas", "ordinal"), [(0, 0), (1, 1), (2, -1)])
def test_an_impossible_share_is_refused(replicas: int, ordinal: int) -> None:
    with pytest.raises(ValueError, match="replica"):
        ReplicaShare(replicas, ordinal)
