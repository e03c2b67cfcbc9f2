"""S-C07: endpoints that are replaced for ever leave nothing behind, in whatever state they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.events import AllBlocksCleared, BlockStored, EventBatch
from epp.core.index_choice import IndexMaker
from epp.core.types import CacheTier, Endpoint, EndpointMetrics, EngineBlockHash
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from epp.telemetry.kv_events import KvEventsCollector
from epp.telemetry.metrics import PeerRefusals, PoolCollector
from epp.thresholds.directory_source import ThresholdState
from tests.unit.core.test_endpoint_picker import SETTINGS

ROUNDS = 1_000
SLACK_BYTES = 4 << 10  # empty tables keep some room; a thousand endpoints would have taken megabytes
KEPT = EndpointId("kept")


def batch(number: int) -> EventBatch:
    """Blocks shared with others, blocks of its own stored twice, orphans, and names never explained."""
    first = number % 7
    return EventBatch(
        (
            stored(0, 8, 0),
            stored(8, 12, number),
            stored(8, 12, number),
            BlockStored(CacheTier.DEVICE, names(first + 50, first + 52), EngineBlockHash(9_999), [1] * 8, 4),
            BlockStored(CacheTier.CPU, names(60, 64), None, None, 0),
        ),
        0,
        number,
    )


def names(start: int, stop: int) -> tuple[EngineBlockHash, ...]:
    return tuple(EngineBlockHash(i + 1) for i in range(start, stop))


def stored(start: int, stop: int, salt: int) -> BlockStored:
    tokens = [i + 1_000 * salt for i in range(4 * start, 4 * stop)]
    parent = EngineBlockHash(start) if start else None
    return BlockStored(CacheTier.DEVICE, names(start, stop), parent, tokens, 4)


def sizes_of(*roots: object) -> Counter[str]:
    """Entries in all containers reachable from the attributes of our own objects, by path."""
    sizes: Counter[str] = Counter()
    for path, size in _containers(roots):
        sizes[path] += size
    return sizes


def _containers(root: object) -> Iterator[tuple[str, int]]:
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [(type(root).__name__, root)]
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | tuple) or type(value).__name__ in ("deque", "OrderedDict"):
            yield path, len(value)  # type: ignore[arg-type]
            items = list(value.values()) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
            pending += [(f"{path}[]", item) for item in items]
        elif type(value).__module__.startswith(("epp.", "engine_plugin.")):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in {*getattr(value, "__dict__", {}), *slots}:
                pending.append((f"{path}.{name}", getattr(value, name, None)))


def live_through(
    picker: EndpointPicker, events: KvEventsManager, refusals: PeerRefusals, number: int
) -> None:
    """One endpoint from its discovery to its end, in one of the states it can end in."""
    endpoint, cache = EndpointId(f"pod-{number}", number % 3), picker.cache
    picker.upsert_endpoint(Endpoint(endpoint, "10.0.0.1", 8000 + number % 50))
    events.add_endpoint(endpoint, EventSource("10.0.0.1", 5557, 5657))
    picker.update_metrics(endpoint, EndpointMetrics(1.0, 0.0, 0.0, 0.0))
    refusals.update(endpoint, {("peer", "seed_fp"): 1.0})
    cache.on_connect(endpoint, 1.0)
    if number % 4:
        cache.on_replay_end(endpoint, True, 1.0)  # else it leaves while its replay runs
    cache.on_batch(endpoint, 0, batch(number), 1.0)
    if number % 5 == 1:
        cache.on_batch(endpoint, 1, EventBatch((AllBlocksCleared(),), 0, 1), 1.0)
    if number % 5 == 2:
        cache.on_batch(endpoint, 9, batch(number), 1.0)  # a gap
    if number % 5 == 3:
        cache.on_disconnect(endpoint, 1.0)
    if number % 5 == 4:
        cache.note_pull(endpoint, missed=True)
    events.remove_endpoint(endpoint)
    refusals.forget(endpoint)
    picker.remove_endpoint(endpoint)


def test_a_thousand_rounds_leave_every_table_as_the_first_ones_did(make_index: IndexMaker) -> None:
    index = make_index(b"c" * 16)
    picker = EndpointPicker(SETTINGS, CacheView(index))
    events, refusals = KvEventsManager(picker.cache), PeerRefusals()
    registry = CollectorRegistry()
    registry.register(PoolCollector(picker, ThresholdState, refusals, clock=lambda: 1.0))
    registry.register(KvEventsCollector(picker, events, clock=lambda: 1.0))
    picker.upsert_endpoint(Endpoint(KEPT, "10.0.0.2", 8000))
    picker.cache.on_connect(KEPT, 1.0)
    picker.cache.on_batch(KEPT, 0, batch(0), 1.0, replayed=True)
    picker.cache.on_replay_end(KEPT, True, 1.0)
    index.sweep(1_000)
    kept_blocks, kept_bytes = len(index), index.total_bytes  # type: ignore[arg-type]
    sizes: list[Counter[str]] = []
    for number in range(1, ROUNDS + 1):
        live_through(picker, events, refusals, number)
        if number in (50, ROUNDS):
            index.sweep(1_000)
            index.check_integrity()
            sizes.append(sizes_of(picker, events, refusals, index))
            sizes[-1]["page"] = len(generate_latest(registry))
    assert sizes[1] == sizes[0]
    assert len(index) == kept_blocks  # type: ignore[arg-type]
    assert index.total_bytes - kept_bytes <= SLACK_BYTES
    assert picker.cache.stats(KEPT).index.device_blocks == 12
