"""A pull in the picker: named, outstanding, ended by whatever comes first, limited, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from engine_plugin.transport.types import PullReason
from epp.core.decision_record import PullState
from epp.core.disagg import DisaggProfileHandler
from epp.core.endpoint_picker import PickerSettings
from epp.core.scheduler import Profile
from epp.core.speculation import SpeculationSettings
from epp.core.thresholds import PullSettings, PullThresholds, ReplicaShare, Scope, everywhere
from epp.core.types import PULL_MISSED, Endpoint, Outcome, PullReport, SourceReason
from epp.plugins.deciders import AlwaysDisaggDecider
from epp.plugins.filters import decode_filter, prefill_filter
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.scorers import QueueScorer
from tests.unit.core.rows import info
from tests.unit.core.test_endpoint_picker import BLOCK, BLOCKS, SETTINGS, Pool


def busy_pool(settings: PickerSettings = SETTINGS, speculation: SpeculationSettings | None = None) -> Pool:
    """Endpoint b holds the prompt and is busy, so that others compute and b becomes the source."""
    pool = Pool(replace(settings, metrics_staleness_s=1e9), speculation)
    pool.hold("b")
    pool.metrics("b", waiting=50.0)
    for number in range(20):
        pool.picker.ledger.book(
            f"x{number}",
            serving=EndpointId("b"),
            computing=EndpointId("b"),
            source=None,
            uncached_prompt_tokens=0,
        )
    return pool


def report(decision_id: str, **changed: object) -> PullReport:
    row = PullReport(decision_id, "10.0.0.1:7777", 3200, 3200, 1 << 20, "ok", 12.5)
    return replace(row, **changed)  # type: ignore[arg-type]


def test_an_outstanding_pull_ends_at_the_engines_report() -> None:
    pool = busy_pool()
    decision = pool.ask()
    picker, b = pool.picker, EndpointId("b")
    assert picker.ledger.load(b).pulls_served == 1
    assert not picker.pull_finished(report("unknown"), decision.computing)
    assert not picker.pull_finished(report(decision.decision_id), b), (
        "only the computing engine may report it"
    )
    assert picker.ledger.load(b).pulls_served == 1
    assert picker.pull_finished(report(decision.decision_id), decision.computing)
    assert not picker.pull_finished(report(decision.decision_id), decision.computing)
    assert picker.ledger.load(b).pulls_served == 0
    record = picker.find_decision("r")
    assert record is not None
    assert (record.pull_state, record.report) == (PullState.REPORTED, report(decision.decision_id))
    assert picker.records.take_finished() == [], "its stream is still open"
    picker.release(decision.decision_id, Outcome(status=200))
    (finished,) = picker.records.take_finished()
    assert finished.outcome == Outcome(status=200)
    assert finished.report == report(decision.decision_id)


def test_pulls_that_find_nothing_void_the_sources_claims() -> None:
    """S-C06: three misses in a row; a pull that brings something counts as a sign of life."""
    pool = busy_pool()
    b = EndpointId("b")

    def pull(number: int, received: int, reason: str) -> None:
        decision = pool.ask(f"r{number}")
        assert decision.kv_source is not None
        ended = report(decision.decision_id, received_tokens=received, reason=reason)
        assert pool.picker.pull_finished(ended, decision.computing)

    for number, (received, reason) in enumerate([(0, "miss"), (0, "miss"), (16, "miss"), (0, "timeout")]):
        pull(number, received, reason)
    for number in range(10, 12):
        pull(number, 0, "miss")
    assert pool.picker.cache.stats(b).index.cpu_blocks == BLOCKS
    pull(12, 0, "miss")
    assert pool.picker.cache.stats(b).index.cpu_blocks == 0
    assert PullReason.MISS == PULL_MISSED
    assert pool.ask("after").kv_source is None


def test_an_outstanding_pull_ends_by_itself_one_second_after_its_deadline() -> None:
    pool = busy_pool(replace(SETTINGS, pull_deadline_s=5.0))
    decision = pool.ask(now_s=1.0)
    picker = pool.picker
    picker.release(decision.decision_id, Outcome(status=200))
    picker.expire(6.99)
    assert picker.records.take_finished() == [], "a report may still come"
    picker.expire(7.0)
    (record,) = picker.records.take_finished()
    assert (record.pull_state, record.report) == (PullState.UNKNOWN, None)
    assert not picker.pull_finished(report(decision.decision_id), decision.computing), "too late"


def test_scheduling_sees_that_time_has_passed() -> None:
    pool = busy_pool()
    first = pool.ask("r1", now_s=0.0)
    assert first.kv_source is not None
    pool.metrics("b", waiting=50.0, at_s=10.9)
    assert pool.picker.ledger.load(EndpointId("b")).pulls_served == 1
    pool.ask("r2", now_s=11.0)
    assert pool.picker.ledger.load(EndpointId("b")).pulls_served == 1, (
        "the first one expired, the second counts"
    )


def test_a_limit_spreads_over_replicas_and_stops_a_burst() -> None:
    pool = busy_pool()
    pool.picker.sources.set_thresholds(everywhere(PullSettings(max_inflight_pulls=3)))
    pool.picker.sources.set_share(ReplicaShare(2, 1))  # of 3: one is ours, two are the other's
    first, second = pool.ask("r1"), pool.ask("r2")
    assert first.choice.reason is SourceReason.PULL
    assert second.choice.reason is SourceReason.OVER_LIMIT
    pool.picker.first_token(first.decision_id)
    assert pool.ask("r3").choice.reason is SourceReason.PULL
    pool.picker.sources.set_share(ReplicaShare())
    assert pool.ask("r4").choice.reason is SourceReason.PULL


@pytest.mark.parametrize(("limit", "replicas"), [(5, 2), (2, 3), (1, 2)])
def test_several_pickers_keep_to_a_limit_together(limit: int, replicas: int) -> None:
    """Each sees every endpoint and nothing of the other's pulls: the sum is what a source serves."""
    pulls, pools = 0, [busy_pool() for _ in range(replicas)]
    for ordinal, pool in enumerate(pools):
        pool.picker.sources.set_thresholds(everywhere(PullSettings(max_inflight_pulls=limit)))
        pool.picker.sources.set_share(ReplicaShare(replicas, ordinal))
    for number in range(2 * limit):
        pulls += sum(pool.ask(f"r{number}").choice.source is not None for pool in pools)
    assert pulls == limit
    assert sum(pool.picker.ledger.load(EndpointId("b")).pulls_served for pool in pools) == limit


def test_a_pair_that_refused_each_other_is_left_alone_for_a_while() -> None:
    pool = busy_pool()
    pool.metrics("b", waiting=50.0, info=info(instance="bbb"))
    for pod in "ac":
        pool.picker.update_refusals(EndpointId(pod), {("bbb", "seed_fp"): 1.0}, 0.0)
    assert pool.ask("r1").choice.reason is SourceReason.PEER_REFUSED
    assert pool.ask("r2", now_s=60.0).choice.reason is SourceReason.PULL, "tried again"
    for pod in "ac":
        pool.picker.update_refusals(EndpointId(pod), {("bbb", "seed_fp"): 2.0}, 60.0)
    assert pool.ask("r3", now_s=61.0).choice.reason is SourceReason.PEER_REFUSED
    pool.metrics("b", waiting=50.0, info=info(instance="new"), at_s=61.0)
    assert pool.ask("r4", now_s=61.0).choice.reason is SourceReason.PULL, "restarted: another engine"


def split_pool() -> Pool:
    """Decode on c; prefill on a, or on b, which holds the prompt and is busy."""

    def profile(name: str, roles: object) -> Profile:
        return Profile(name, (roles,), ((QueueScorer("queue"), 1.0),), MaxScorePicker("max"))  # type: ignore[arg-type]

    handler = DisaggProfileHandler(
        profile("decode", decode_filter("d")),
        profile("prefill", prefill_filter("p")),
        AlwaysDisaggDecider("always"),
    )
    pool = Pool(replace(SETTINGS, handler=handler, metrics_staleness_s=1e9))
    for number, (pod, role) in enumerate((("a", "prefill"), ("b", "prefill"), ("c", "decode"))):
        labels = {"llm-d.ai/role": role}
        pool.picker.upsert_endpoint(Endpoint(EndpointId(pod), f"10.0.0.{number}", 8000, labels))
    pool.hold("b")
    pool.metrics("b", waiting=50.0)
    return pool


def test_the_prefill_endpoint_pulls_and_only_its_word_counts() -> None:
    pool = split_pool()
    decision = pool.ask()
    assert decision.prefill is not None
    assert (decision.destination.id.pod, decision.prefill.id.pod) == ("c", "a")
    assert decision.computing == EndpointId("a")
    assert decision.kv_source is not None
    assert decision.kv_source.id.pod == "b"
    assert not pool.picker.pull_finished(report(decision.decision_id), decision.destination.id)
    assert pool.picker.pull_finished(report(decision.decision_id), EndpointId("a"))


def test_what_the_prefill_endpoint_holds_is_what_must_be_out_cached() -> None:
    """The decode endpoint's own copy does not matter."""
    pool = split_pool()
    pool.hold("c")
    assert pool.ask("r1").choice.source is not None
    pool.hold("a", BLOCKS - 5)  # 80 tokens less, the delta is 100
    second = pool.ask("r2")
    assert second.choice.reason is SourceReason.BELOW_DELTA
    assert second.computing_cached_tokens == (BLOCKS - 5) * BLOCK


def test_the_role_of_thresholds_is_the_computing_endpoints() -> None:
    pool = split_pool()
    for role, reason in (("decode", SourceReason.PULL), ("prefill", SourceReason.SWITCHED_OFF)):
        pool.picker.sources.set_thresholds(PullThresholds({Scope(role=role): PullSettings(enabled=False)}, 1))
        assert pool.ask(f"r-{role}").choice.reason is reason
