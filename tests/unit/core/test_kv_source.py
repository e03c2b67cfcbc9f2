"""The source rule, clause by clause. A property test each, so that breaking a clause breaks its test."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.kv_source import choose_source, sampling_coordinate
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds, SourcePolicy, effective_policy
from epp.core.types import ClaimState, SourceReason
from tests.unit.core.rows import BLOCK, candidate, info, request

ON = SourcePolicy(configured=True, min_cached_token_delta=1)
ids = st.text(st.characters(codec="utf-8"), max_size=40)
depth = st.integers(0, 200)


def delta(blocks: int) -> SourcePolicy:
    return SourcePolicy(configured=True, min_cached_token_delta=blocks * BLOCK)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)],  # published FNV-1a 32 vectors
)
def test_coordinate_is_fnv_1a_32(text: str, value: int) -> None:
    assert sampling_coordinate(text) == value / 2**32


@given(st.lists(depth, min_size=2, max_size=8), ids)
def test_only_holders_within_one_block_of_the_best_are_sampled(depths: list[int], rid: str) -> None:
    rows = [candidate(f"e{i}", blocks=d) for i, d in enumerate(depths)]
    choice = choose_source(request(rid), rows, candidate("z"), ON)
    best = max(depths)
    if choice.source is not None:
        assert choice.source.servable_tokens >= (best - 1) * BLOCK
        in_band = {r.endpoint.id for r, d in zip(rows, depths, strict=True) if d and d + 1 >= best}
        assert {row[0] for row in choice.considered} == in_band
    else:
        assert best == 0


@given(depth, depth, depth)
def test_only_the_cpu_prefix_of_a_holder_counts(cpu: int, device: int, local: int) -> None:
    holder = candidate("a", blocks=max(cpu, device), cpu=cpu, device=device)
    choice = choose_source(request(), [holder], candidate("b", blocks=local), ON)
    if cpu > local:
        assert choice.source is not None
        assert choice.source.gain_tokens == (cpu - local) * BLOCK
    else:
        assert choice.source is None


@given(depth, depth)
def test_all_tiers_of_the_computing_endpoint_count(device: int, cpu: int) -> None:
    computing = candidate("b", blocks=max(device, cpu), device=device, cpu=cpu)
    choice = choose_source(request(), [candidate("a", blocks=100)], computing, delta(1))
    assert (choice.reason is SourceReason.PULL) == (100 - max(device, cpu) >= 1)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 60))
def test_gain_must_reach_the_delta_in_tokens(source: int, local: int, needed: int) -> None:
    choice = choose_source(
        request(), [candidate("a", blocks=source)], candidate("b", blocks=local), delta(needed)
    )
    assert (choice.source is not None) == (source > 0 and source - local >= needed)
    if choice.source is None and source > 0:
        assert choice.reason is SourceReason.BELOW_DELTA


def test_sampling_follows_one_over_one_plus_waiting() -> None:
    rows = [candidate("a", blocks=100, waiting=7), candidate("b", blocks=100, waiting=0)]
    picked = Counter(
        str(choose_source(request(f"req-{i}"), rows, candidate("c"), ON).source.endpoint.id.pod)  # type: ignore[union-attr]
        for i in range(4000)
    )
    assert picked["a"] / 4000 == pytest.approx((1 / 8) / (1 + 1 / 8), abs=0.02)
    assert choose_source(request(), rows, candidate("c"), ON).considered == (
        (rows[0].endpoint.id, 1600, 1 / 8),
        (rows[1].endpoint.id, 1600, 1.0),
    )


@given(ids)
def test_the_same_request_id_samples_the_same_source_whatever_the_order(rid: str) -> None:
    rows = [candidate(p, blocks=50, waiting=i) for i, p in enumerate("abcd")]
    there = choose_source(request(rid), rows, candidate("z"), ON)
    back = choose_source(request(rid), rows[::-1], candidate("z"), ON)
    assert there == back


def test_unknown_waiting_counts_as_zero_as_in_the_reference() -> None:
    rows = [candidate("a", blocks=9, waiting=None)]
    assert choose_source(request(), rows, candidate("b"), ON).considered[0][2] == 1.0


@given(depth, ids)
def test_never_itself(blocks: int, rid: str) -> None:
    me = candidate("a", blocks=blocks)
    choice = choose_source(request(rid), [me, candidate("b", blocks=blocks)], me, ON)
    assert choice.source is None or choice.source.endpoint.id != me.endpoint.id


@given(st.integers(1, 200), ids)
def test_holders_that_tie_with_the_computing_endpoint_stay_local(blocks: int, rid: str) -> None:
    me = candidate("a", blocks=blocks)
    choice = choose_source(request(rid), [me, candidate("b", blocks=blocks)], me, ON)
    assert choice.source is None
    assert choice.reason in (SourceReason.LOCAL_BEST, SourceReason.BELOW_DELTA)


@pytest.mark.parametrize("state", [ClaimState.UNKNOWN, ClaimState.SYNCING])
def test_no_claim_no_source_and_no_blind_pull(state: ClaimState) -> None:
    blind = candidate("b", blocks=5, state=state)
    holder = candidate("a", blocks=50, state=state)
    assert choose_source(request(), [holder, blind], blind, ON).reason is SourceReason.NO_CLAIM
    live = candidate("a", blocks=50)
    assert choose_source(request(), [live, blind], blind, ON).reason is SourceReason.DESTINATION_UNKNOWN
    assert choose_source(request(), [holder], candidate("c"), ON).source is None


def test_a_partial_claim_is_a_lower_bound_that_may_serve() -> None:
    partial = candidate("a", blocks=50, state=ClaimState.PARTIAL)
    assert choose_source(request(), [partial], candidate("b"), ON).reason is SourceReason.PULL


def test_draining_holders_serve_nobody() -> None:
    choice = choose_source(request(), [candidate("a", blocks=50, draining=True)], candidate("b"), ON)
    assert choice.reason is SourceReason.NO_HOLDER


@pytest.mark.parametrize(
    "field", ["protocol", "block_size_tokens", "hash_algo", "seed_fp", "model_fp", "layout_fp"]
)
def test_a_known_mismatch_is_never_named(field: str) -> None:
    wrong = info(**{field: 99 if field == "block_size_tokens" else "other"})
    rows = [candidate("a", blocks=50, engine=wrong)]
    choice = choose_source(request(), rows, candidate("b", engine=info()), ON)
    assert choice.reason is SourceReason.INCOMPATIBLE
    rows.append(candidate("c", blocks=20, engine=info()))
    choice = choose_source(request(), rows, candidate("b", engine=info()), ON)
    assert choice.source is not None
    assert choice.source.endpoint.id.pod == "c"


def test_unverified_engines_are_named_unless_refused() -> None:
    rows = [candidate("a", blocks=50)]
    assert choose_source(request(), rows, candidate("b", engine=info()), ON).reason is SourceReason.PULL
    strict = SourcePolicy(configured=True, min_cached_token_delta=1, require_verified=True)
    refused = choose_source(request(), rows, candidate("b", engine=info()), strict)
    assert refused.reason is SourceReason.UNVERIFIED


def test_off_by_default_and_why() -> None:
    rows, here = [candidate("a", blocks=50)], candidate("b")
    off = effective_policy(None, configured=False, thresholds=PullThresholds(min_cached_token_delta=1))
    assert choose_source(request(), rows, here, off).reason is SourceReason.NOT_CONFIGURED
    unset = effective_policy(None, configured=True, thresholds=NO_THRESHOLDS)
    assert choose_source(request(), rows, here, unset).reason is SourceReason.SWITCHED_OFF
    disabled = effective_policy(1, configured=True, thresholds=PullThresholds(enabled=False))
    assert choose_source(request(), rows, here, disabled).reason is SourceReason.SWITCHED_OFF
    assert choose_source(request(tokens=None), rows, here, ON).reason is SourceReason.NO_TOKENS


def test_thresholds_override_the_producers_delta() -> None:
    policy = effective_policy(
        1, configured=True, thresholds=PullThresholds(min_cached_token_delta=51 * BLOCK)
    )
    choice = choose_source(request(), [candidate("a", blocks=50)], candidate("b"), policy)
    assert choice.reason is SourceReason.BELOW_DELTA
    assert choice.min_cached_token_delta == 51 * BLOCK
