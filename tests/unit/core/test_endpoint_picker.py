"""The facade: destination first, source second; pool changes; load booked and returned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.disagg import SingleProfileHandler
from epp.core.endpoint_picker import EndpointPicker, PickerSettings
from epp.core.errors import NoEndpoints
from epp.core.events import BlockStored, EventBatch
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.scheduler import Profile
from epp.core.source_selector import SourceProducer
from epp.core.speculation import SpeculationSettings
from epp.core.thresholds import PullSettings, everywhere
from epp.core.types import (
    CacheTier,
    ClaimState,
    Endpoint,
    EndpointMetrics,
    EngineBlockHash,
    Outcome,
    SchedulingRequest,
    SourceReason,
)
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.scorers import ActiveRequestScorer, PrefixCacheScorer, QueueScorer
from tests.unit.core.rows import info

BLOCK, BLOCKS = 16, 200
PROMPT = list(range(BLOCK * BLOCKS + 5))
SETTINGS = PickerSettings(
    SingleProfileHandler(
        Profile(
            "default",
            (),
            (
                (PrefixCacheScorer("prefix"), 3.0),
                (QueueScorer("queue"), 2.0),
                (ActiveRequestScorer("active"), 2.0),
            ),
            MaxScorePicker("max"),
        )
    ),
    SourceProducer(100),
)


class Pool:
    """A picker over endpoints a, b, c whose event streams are all live and empty."""

    def __init__(
        self, settings: PickerSettings = SETTINGS, speculation: SpeculationSettings | None = None
    ) -> None:
        index = PythonPrefixIndex(bytes(16))
        self.picker = EndpointPicker(settings, CacheView(index, speculation=speculation))
        self.count = 0
        for number, pod in enumerate("abc"):
            self.add(pod, number)

    def add(self, pod: str, number: int) -> EndpointId:
        endpoint = Endpoint(EndpointId(pod), f"10.0.0.{number}", 8000)
        self.picker.upsert_endpoint(endpoint)
        self.picker.cache.on_connect(endpoint.id, 0.0)
        self.picker.cache.on_replay_end(endpoint.id, True, 0.0)
        self.metrics(pod, waiting=0.0)
        return endpoint.id

    def metrics(self, pod: str, *, waiting: float | None, at_s: float = 0.0, **changed: object) -> None:
        row = EndpointMetrics(at_s, waiting, 0.0, 0.0, BLOCK)
        self.picker.update_metrics(EndpointId(pod), replace(row, **changed))  # type: ignore[arg-type]

    def hold(self, pod: str, blocks: int = BLOCKS) -> None:
        events = tuple(
            BlockStored(
                tier,
                tuple(EngineBlockHash(i + 1) for i in range(blocks)),
                None,
                PROMPT[: blocks * BLOCK],
                BLOCK,
                has_extra_keys=True,
            )
            for tier in (CacheTier.DEVICE, CacheTier.CPU)
        )
        self.picker.cache.on_batch(EndpointId(pod), 0, EventBatch(events), 0.0)

    def ask(self, request_id: str = "r", now_s: float = 0.0, **changed: object):  # type: ignore[no-untyped-def]
        request = replace(SchedulingRequest(request_id, "m", PROMPT), **changed)  # type: ignore[arg-type]
        self.count += 1
        return self.picker.schedule(request, now_s, f"d{self.count}")


def test_a_local_hit_stays_local() -> None:
    pool = Pool()
    pool.hold("b")
    decision = pool.ask()
    assert decision.destination.id.pod == "b"
    assert decision.kv_source is None
    assert decision.choice.reason is SourceReason.LOCAL_BEST
    assert decision.computing_cached_tokens == BLOCKS * BLOCK


def test_a_busy_owner_becomes_the_source() -> None:
    pool = Pool()
    pool.hold("b")
    pool.metrics("b", waiting=9.0)
    for _ in range(4):  # the picker's own load on b
        pool.picker.ledger.book(
            f"x{_}", serving=EndpointId("b"), computing=EndpointId("b"), source=None, uncached_prompt_tokens=0
        )
    decision = pool.ask()
    assert decision.destination.id.pod != "b"
    assert decision.kv_source is not None
    assert decision.kv_source.id.pod == "b"
    assert decision.choice.source is not None
    assert decision.choice.source.gain_tokens == BLOCKS * BLOCK
    load = pool.picker.ledger.load(decision.destination.id)
    assert (load.requests, load.uncached_prompt_tokens) == (1, 5)
    assert pool.picker.ledger.load(EndpointId("b")).pulls_served == 1


def test_release_is_idempotent_and_joins_the_record() -> None:
    pool = Pool()
    decision = pool.ask()
    assert pool.picker.find_decision("r") is pool.picker.find_decision(decision.decision_id)
    assert pool.picker.release(decision.decision_id, Outcome(status=200, completed=True))
    assert not pool.picker.release(decision.decision_id, Outcome(status=500))
    record = pool.picker.find_decision("r")
    assert record is not None
    assert record.outcome == Outcome(status=200, completed=True)
    assert len(pool.picker.ledger) == 0


def test_a_prefix_never_seen_has_no_source() -> None:
    assert Pool().ask().choice.reason is SourceReason.NO_HOLDER


def test_a_restarted_picker_names_nobody_until_it_has_heard() -> None:
    pool = Pool()
    pool.hold("b")
    fresh = EndpointPicker(SETTINGS, CacheView(PythonPrefixIndex(bytes(16))))
    for endpoint in pool.picker.endpoints:
        fresh.upsert_endpoint(endpoint)
    request = SchedulingRequest("r", "m", PROMPT)
    assert fresh.schedule(request, 0.0, "1").choice.reason is SourceReason.NO_CLAIM


def test_an_endpoint_that_comes_back_elsewhere_is_another_engine() -> None:
    pool = Pool()
    pool.hold("b")
    assert not pool.picker.upsert_endpoint(Endpoint(EndpointId("b"), "10.0.0.1", 8000, {"a": "b"}))
    assert pool.picker.upsert_endpoint(Endpoint(EndpointId("b"), "10.0.0.1", 8000), has_replay=False)
    assert pool.picker.upsert_endpoint(Endpoint(EndpointId("b"), "10.9.9.9", 8000), has_replay=False)
    assert pool.picker.cache.state(EndpointId("b")) is ClaimState.UNKNOWN
    assert pool.picker.cache.stats(EndpointId("b")).index.cpu_blocks == 0
    metrics = {r.candidate.endpoint.id.pod: r.candidate.metrics for r in pool.picker.snapshot(0.0)}
    assert metrics["b"].waiting_requests is None
    decision = pool.ask()
    assert decision.kv_source is None


def test_a_flap_keeps_the_load_that_is_really_there() -> None:
    """S-D07."""
    pool = Pool()
    decision = pool.ask()
    pool.picker.remove_endpoint(decision.destination.id)
    pool.picker.upsert_endpoint(decision.destination)
    assert pool.picker.ledger.load(decision.destination.id).requests == 1
    assert pool.picker.release(decision.decision_id)
    assert pool.picker.ledger.load(decision.destination.id).requests == 0
    pool.picker.ledger.check_integrity()


def test_stale_metrics_are_unknown() -> None:
    """S-D02."""
    pool = Pool()
    pool.metrics("a", waiting=0.0, at_s=0.0)
    pool.metrics("b", waiting=3.0, at_s=100.0)
    pool.metrics("c", waiting=5.0, at_s=100.0)
    decision = pool.ask(now_s=100.5)
    waiting = {s.candidate.endpoint.id.pod: s.candidate.metrics.waiting_requests for s in decision.scored}
    assert waiting == {"a": None, "b": 3.0, "c": 5.0}
    assert decision.destination.id.pod == "b"


def test_draining_endpoints_get_no_new_request() -> None:
    """S-D11."""
    pool = Pool()
    pool.hold("b")
    pool.picker.upsert_endpoint(Endpoint(EndpointId("b"), "10.0.0.1", 8000, draining=True))
    decision = pool.ask()
    assert decision.destination.id.pod != "b"
    assert decision.choice.reason is SourceReason.NO_HOLDER


@pytest.mark.parametrize("hint", ["10.0.0.2", "10.0.0.2:8000"])
def test_subset_by_ip_and_by_ip_port(hint: str) -> None:
    assert Pool().ask(subset=frozenset({hint})).destination.id.pod == "c"


@pytest.mark.parametrize("hint", [frozenset(), frozenset({"10.0.0.2:9"})])
def test_an_empty_or_foreign_subset_is_503(hint: frozenset[str]) -> None:
    with pytest.raises(NoEndpoints) as caught:
        Pool().ask(subset=hint)
    assert (caught.value.status, caught.value.reason) == (503, "rejected-no-endpoints")


def test_an_empty_pool_is_503() -> None:
    picker = EndpointPicker(SETTINGS, CacheView(PythonPrefixIndex(bytes(16))))
    with pytest.raises(NoEndpoints, match="no endpoint in the pool"):
        picker.schedule(SchedulingRequest("r"), 0.0, "1")
    assert len(picker.ledger) == 0


def test_mismatching_engines_are_reported_by_name_and_never_named_as_source() -> None:
    pool = Pool()
    pool.hold("b")
    pool.metrics("a", waiting=0.0, info=info())
    pool.metrics("b", waiting=9.0, info=info(seed_fp="other"))
    pool.metrics("c", waiting=9.0, info=info())
    rows = {r.candidate.endpoint.id.pod: r.incompatible_with for r in pool.picker.snapshot(0.0)}
    assert rows["b"] == {"a/0": "seed_fp", "c/0": "seed_fp"}
    assert rows["a"] == {"b/0": "seed_fp"}
    decision = pool.ask(subset=None)
    if decision.destination.id.pod != "b":
        assert decision.choice.reason is SourceReason.INCOMPATIBLE


def test_thresholds_change_the_next_decision() -> None:
    pool = Pool()
    pool.hold("b")
    pool.metrics("b", waiting=9.0)
    first = pool.ask(subset=frozenset({"10.0.0.0", "10.0.0.1"}))
    assert first.choice.min_cached_token_delta == 100
    pool.picker.sources.set_thresholds(everywhere(PullSettings(min_cached_token_delta=10**6), 3))
    second = pool.ask("r2").choice
    assert (second.min_cached_token_delta, second.generation) == (10**6, 3)
    pool.picker.sources.set_thresholds(everywhere(PullSettings(enabled=False)))
    assert pool.ask("r3").choice.reason is SourceReason.SWITCHED_OFF


def test_the_order_in_which_endpoints_came_does_not_matter() -> None:
    pools = [Pool(), Pool()]
    for pool, late in zip(pools, ("a", "c"), strict=True):
        for pod in "abc":
            pool.hold(pod)
        pool.picker.remove_endpoint(EndpointId(late))
        pool.add(late, "abc".index(late))
        pool.hold(late)
    for number in range(20):
        first, second = (pool.ask(f"r{number}").choice for pool in pools)
        assert first.considered == second.considered


def test_falling_asleep_voids_what_an_endpoint_holds() -> None:
    """S-C06: once, at the moment it is seen; what the engine stores after it has woken up counts."""
    pool = Pool()
    pool.hold("b")
    cache, b = pool.picker.cache, EndpointId("b")
    pool.metrics("b", waiting=0.0, asleep=False)
    assert cache.stats(b).index.cpu_blocks == BLOCKS
    pool.metrics("b", waiting=0.0, asleep=True)
    pool.metrics("b", waiting=0.0, asleep=True)
    assert cache.stats(b).index.cpu_blocks == 0
    assert cache.stats(b).counters.distrusted == 1
    assert pool.ask().choice.source is None
    pool.metrics("b", waiting=0.0, asleep=False)
    assert cache.stats(b).counters.distrusted == 1


@pytest.mark.parametrize(
    ("prompt", "held_blocks", "gain"),
    [(5, 0, None), (BLOCK - 1, 1, None), (BLOCK, 1, BLOCK), (2 * BLOCK - 1, 2, BLOCK)],
)
def test_s_b11_whole_blocks_only_are_gained_whatever_the_threshold(
    prompt: int, held_blocks: int, gain: int | None
) -> None:
    """With a threshold of one token: a prompt below a block gains nothing, and none gains part of a block."""
    pool = Pool(replace(SETTINGS, source_producer=SourceProducer(1)))
    if held_blocks:
        pool.hold("b", held_blocks)
    pool.metrics("b", waiting=9.0)
    for number in range(4):
        pool.picker.ledger.book(
            f"x{number}",
            serving=EndpointId("b"),
            computing=EndpointId("b"),
            source=None,
            uncached_prompt_tokens=0,
        )
    decision = pool.ask(token_ids=PROMPT[:prompt])
    assert decision.destination.id.pod != "b"
    assert (decision.choice.source.gain_tokens if decision.choice.source else None) == gain
