"""Speculative entries in decisions: they move requests and stop useless pulls; nobody is pulled from."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine_plugin.identity import EndpointId
from epp.core.disagg import DisaggProfileHandler
from epp.core.endpoint_picker import PickerSettings
from epp.core.kv_source import choose_source
from epp.core.scheduler import Profile
from epp.core.source_selector import SourceProducer
from epp.core.speculation import SpeculationSettings
from epp.core.thresholds import SourcePolicy
from epp.core.types import ClaimState, Endpoint, Outcome, PrefixMatch, SourceReason
from epp.plugins.deciders import AlwaysDisaggDecider, PrefixBasedDecider
from epp.plugins.filters import decode_filter, prefill_filter
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.scorers import ActiveRequestScorer, PrefixCacheScorer, TierWeights
from tests.unit.core.rows import BLOCK, candidate, context, request
from tests.unit.core.test_endpoint_picker import BLOCKS, PROMPT, SETTINGS, Pool

TTL_S = 2.0
ON = SourcePolicy(configured=True, min_cached_token_delta=1)
WHOLE = BLOCKS * BLOCK


def warm_pool(settings: PickerSettings = SETTINGS) -> Pool:
    """Live endpoints that have shown their block size and hold nothing of the prompt."""
    pool = Pool(settings, SpeculationSettings(TTL_S))
    for pod in "abc":
        pool.hold(pod, blocks=1)
    return pool


def matches(pool: Pool, now_s: float = 0.0) -> dict[str, PrefixMatch]:
    ids = [e.id for e in pool.picker.endpoints]
    found = pool.picker.cache.look_up(replace(request(), token_ids=PROMPT), ids, now_s).matches
    return {e.pod: match for e, match in found.items()}


def test_the_next_request_of_a_session_follows_the_one_in_front_of_it() -> None:
    pool = warm_pool()
    first = pool.ask("r1", now_s=0.0)
    follower = pool.ask("r2", now_s=0.1)
    assert follower.destination == first.destination
    assert follower.kv_source is None
    assert follower.computing_cached_tokens == BLOCK  # what is confirmed
    blind = Pool(SETTINGS)
    for pod in "abc":
        blind.hold(pod, blocks=1)
    one, two = blind.ask("r1", now_s=0.0), blind.ask("r2", now_s=0.1)
    assert one.destination != two.destination  # negative control: load alone spreads them


def test_after_its_time_to_live_it_moves_nobody() -> None:
    pool = warm_pool()
    first = pool.ask("r1", now_s=0.0)
    pool.metrics("a", waiting=0.0, at_s=TTL_S)
    assert pool.ask("r2", now_s=TTL_S).destination != first.destination


def test_what_is_on_its_way_is_booked_once() -> None:
    pool = warm_pool()
    first = pool.ask("r1", now_s=0.0)
    load = pool.picker.ledger.load
    assert load(first.destination.id).uncached_prompt_tokens == len(PROMPT) - BLOCK
    pool.ask("r2", now_s=0.1)
    assert load(first.destination.id).uncached_prompt_tokens == len(PROMPT) - BLOCK + len(PROMPT) - WHOLE


# --- the computing side of a pull -------------------------------------------------------------------


def pulling_pool() -> Pool:
    """b holds everything and is too busy: requests go elsewhere and pull from b."""
    pool = Pool(SETTINGS, SpeculationSettings(TTL_S))
    pool.hold("a", blocks=1)
    pool.hold("b")
    pool.hold("c", blocks=1)
    pool.metrics("b", waiting=9.0)
    for number in range(4):
        pool.picker.ledger.book(
            f"x{number}",
            serving=EndpointId("b"),
            computing=EndpointId("b"),
            source=None,
            uncached_prompt_tokens=0,
        )
    return pool


def test_what_is_being_pulled_is_not_pulled_again() -> None:
    pool = pulling_pool()
    only = frozenset({"10.0.0.0", "10.0.0.1"})
    first = pool.ask("r1", subset=only)
    assert (first.destination.id.pod, first.kv_source and first.kv_source.id.pod) == ("a", "b")
    behind = pool.ask("r2", subset=only, now_s=0.1)
    assert behind.destination.id.pod == "a"
    assert (behind.kv_source, behind.choice.reason) == (None, SourceReason.BELOW_DELTA)
    assert pool.picker.ledger.load(EndpointId("b")).pulls_served == 1


def test_a_failed_pull_does_not_stop_the_next_one() -> None:
    pool = pulling_pool()
    only = frozenset({"10.0.0.0", "10.0.0.1"})
    first = pool.ask("r1", subset=only)
    pool.picker.release(first.decision_id, Outcome(status=503))
    again = pool.ask("r2", subset=only, now_s=0.1)
    assert (again.destination.id.pod, again.kv_source and again.kv_source.id.pod) == ("a", "b")


@pytest.mark.parametrize("seen", [True, False])
def test_a_computed_prompt_stays_expected_when_its_answer_ends(seen: bool) -> None:
    """Also where the gateway shows no response bodies (S-A07)."""
    pool = pulling_pool()
    only = frozenset({"10.0.0.0", "10.0.0.1"})
    first = pool.ask("r1", subset=only)
    if seen:
        pool.picker.first_token(first.decision_id)
    pool.picker.release(first.decision_id, Outcome(status=200, completed=True))
    assert matches(pool)["a"].speculative_blocks == BLOCKS
    assert pool.ask("r2", subset=only, now_s=0.1).kv_source is None


def test_the_time_to_live_bounds_a_wrong_expectation() -> None:
    pool = pulling_pool()
    only = frozenset({"10.0.0.0", "10.0.0.1"})
    pool.ask("r1", subset=only)
    pool.metrics("a", waiting=0.0, at_s=TTL_S)
    pool.metrics("b", waiting=9.0, at_s=TTL_S)
    late = pool.ask("r2", subset=only, now_s=TTL_S)
    assert late.kv_source is not None
    assert late.kv_source.id.pod == "b"


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 150))
def test_the_computing_side_counts_what_is_expected(source: int, local: int, speculative: int) -> None:
    computing = candidate("z", blocks=local, cpu=0, speculative=speculative)
    choice = choose_source(request(), [candidate("a", blocks=source), computing], computing, ON)
    gain = (source - max(local, speculative)) * BLOCK
    assert (choice.source is not None) == (source > 0 and gain >= 1)
    if choice.source is not None:
        assert choice.source.gain_tokens == gain


# --- never a source ---------------------------------------------------------------------------------

depth = st.integers(0, 60)
states = st.sampled_from([ClaimState.LIVE, ClaimState.LIVE, ClaimState.PARTIAL, ClaimState.SYNCING])


@given(
    st.lists(st.tuples(depth, depth, depth, states), min_size=1, max_size=6),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_a_holders_expectations_change_no_choice(
    rows: list[tuple[int, int, int, ClaimState]], rid: str
) -> None:
    """Whatever is expected at everybody else, the choice is the one without it; the computing endpoint's
    own expectations can only take a source away."""
    plain = [candidate(f"e{i}", blocks=b, cpu=c, state=s) for i, (b, c, _, s) in enumerate(rows)]
    told = [
        row._replace(match=row.match._replace(speculative_blocks=s))
        for row, (_, _, s, _) in zip(plain, rows, strict=True)
    ]
    computing = candidate("z", blocks=3, cpu=0)
    choice = choose_source(request(rid), [*plain, computing], computing, ON)
    assert choose_source(request(rid), [*told, computing], computing, ON).reason is choice.reason
    named = choose_source(request(rid), [*told, computing], computing, ON).source
    assert (named and named.endpoint) == (choice.source and choice.source.endpoint)
    if named is not None:
        row = next(r for r in plain if r.endpoint == named.endpoint)
        assert named.servable_tokens == row.match.cpu_blocks * BLOCK > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "first", "fail", "hold", "wait"]),
            st.sampled_from("abc"),
            st.integers(1, BLOCKS),
        ),
        max_size=25,
    )
)
def test_nobody_is_named_for_more_than_it_has_reported(steps: list[tuple[str, str, int]]) -> None:
    """Through the whole picker, whatever was placed where, failed or ran out."""
    pool = Pool(replace(SETTINGS, source_producer=SourceProducer(1)), SpeculationSettings(TTL_S))
    reported = dict.fromkeys("abc", 0)
    open_ids: list[str] = []
    now_s = 0.0
    for number, (what, pod, blocks) in enumerate(steps):
        if what == "ask":
            others = frozenset(f"10.0.0.{n}" for n, p in enumerate("abc") if p != pod)
            decision = pool.ask(f"r{number}", now_s=now_s, token_ids=PROMPT[: blocks * BLOCK], subset=others)
            open_ids.append(decision.decision_id)
            if decision.choice.source is not None:
                source = decision.choice.source
                assert source.servable_tokens <= reported[source.endpoint.id.pod] * BLOCK
            assert all(t <= reported[e.pod] * BLOCK for e, t, _ in decision.choice.considered)
        elif what == "hold" and not reported[pod]:
            pool.hold(pod, blocks)
            reported[pod] = blocks
        elif what == "wait":
            now_s += blocks / 100
        elif open_ids and what == "first":
            pool.picker.first_token(open_ids[0])
        elif open_ids and what == "fail":
            pool.picker.release(open_ids.pop(0))
    for decision_id in open_ids:
        pool.picker.release(decision_id)
    entries = pool.picker.cache._speculative
    assert entries is not None
    assert entries.pending == 0
    entries.check_integrity()


# --- prefill and decode -----------------------------------------------------------------------------


def pd_pool() -> Pool:
    scorers = ((PrefixCacheScorer("prefix"), 3.0), (ActiveRequestScorer("active"), 1.0))
    handler = DisaggProfileHandler(
        Profile("decode", (decode_filter("d"),), scorers, MaxScorePicker("max")),
        Profile("prefill", (prefill_filter("p"),), scorers, MaxScorePicker("max")),
        AlwaysDisaggDecider("always"),
    )
    pool = warm_pool(PickerSettings(handler, SourceProducer(1)))
    for number, (pod, role) in enumerate([("a", "prefill"), ("b", "decode"), ("c", "decode")]):
        labels = {"llm-d.ai/role": role}
        pool.picker.upsert_endpoint(Endpoint(EndpointId(pod), f"10.0.0.{number}", 8000, labels))
    return pool


def test_under_prefill_decode_both_endpoints_expect_the_prompt() -> None:
    pool = pd_pool()
    decision = pool.ask("r1")
    assert decision.prefill is not None
    assert decision.computing.pod == "a"
    destination = decision.destination.id.pod
    idle = ({"b", "c"} - {destination}).pop()
    found = matches(pool)
    assert [found[p].speculative_blocks for p in ("a", destination, idle)] == [BLOCKS, BLOCKS, 0]
    assert pool.ask("r2", now_s=0.1).destination == decision.destination
    pool.picker.release(decision.decision_id)
    assert matches(pool)["a"].speculative_blocks == BLOCKS  # r2's, still on its way


# --- plugins ----------------------------------------------------------------------------------------


def test_prefix_score_counts_expected_blocks_as_device_blocks() -> None:
    scorer = PrefixCacheScorer("p", TierWeights(1.0, 0.5))
    rows = [
        candidate("a", blocks=128, device=0, speculative=256),
        candidate("b", blocks=256, device=256, speculative=0),
        candidate("c", blocks=0, speculative=256),
        candidate("d", blocks=0, speculative=256, state=ClaimState.SYNCING),
    ]
    assert scorer.score(context(), rows) == pytest.approx([0.75, 1.0, 1.0, 2.75 / 3])
    by_length = PrefixCacheScorer("p", length_weight=1.0, length_scale_tokens=4096)
    assert by_length.score(context(), rows[1:3]) == pytest.approx([1.0, 1.0])


def test_the_prefix_decider_sees_what_is_on_its_way() -> None:
    decider = PrefixBasedDecider("d", non_cached_tokens=100 * BLOCK)
    assert decider.wants_prefill(context(), candidate("a", blocks=0, speculative=156))
    assert not decider.wants_prefill(context(), candidate("a", blocks=0, speculative=157))
    unknown = candidate("a", blocks=0, speculative=256, state=ClaimState.UNKNOWN)
    assert decider.wants_prefill(context(), unknown)
