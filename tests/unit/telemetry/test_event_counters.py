"""S-H07: what became of an engine's cache events is counted by endpoint and outcome: a hollow index shows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from engine_plugin.identity import EndpointId
from epp.core.events import BlockRemoved, BlockStored, EventBatch
from epp.core.types import CacheTier, EngineBlockHash
from epp.telemetry.metrics import PeerRefusals, PoolCollector
from epp.thresholds.in_force import ThresholdState
from tests.unit.core.test_endpoint_picker import BLOCK, Pool


def stored(first: int, blocks: int, parent: int | None) -> BlockStored:
    return BlockStored(
        CacheTier.DEVICE,
        tuple(EngineBlockHash(first + number) for number in range(blocks)),
        None if parent is None else EngineBlockHash(parent),
        list(range(BLOCK * blocks)),
        BLOCK,
        has_extra_keys=True,
    )


def outcomes(pool: Pool, endpoint: str) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool.picker, ThresholdState, PeerRefusals()))
    return {
        sample.labels["outcome"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kvpull_epp_kv_events_total" and sample.labels["endpoint"] == endpoint
    }


def test_blocks_without_a_parent_are_counted_apart_from_those_that_count() -> None:
    pool = Pool()
    events = (
        stored(1, 4, None),
        stored(100, 3, parent=99),
        BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(4),)),
    )
    pool.picker.cache.on_batch(EndpointId("b"), 0, EventBatch(events), 0.0)
    pool.picker.cache.on_batch(EndpointId("b"), 5, EventBatch(()), 0.0)  # 1 to 4 are lost
    found = outcomes(pool, "b/0")
    shown = {name: found[name] for name in ("stored_blocks", "orphan_blocks", "removed_blocks", "gaps")}
    assert shown == {"stored_blocks": 4.0, "orphan_blocks": 3.0, "removed_blocks": 1.0, "gaps": 1.0}
    others = outcomes(pool, "a/0")
    assert not any(others[name] for name in shown), "nothing came from there"
    pool.picker.remove_endpoint(EndpointId("b"))
    assert outcomes(pool, "b/0") == {}, "its series end with it"
