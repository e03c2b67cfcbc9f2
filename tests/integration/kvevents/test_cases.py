"""Cases S-C01 to S-C05, S-C17 and the life of a claim, over real ZMQ sockets."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.index_choice import choose_index
from epp.core.stream_step import StreamLimits
from epp.core.types import ClaimState, Endpoint
from epp.kvevents.event_fields import MAX_PAYLOAD_BYTES
from epp.kvevents.manager import KvEventsManager, ManagerSettings
from epp.kvevents.packed_codec import choose_decoder
from epp.telemetry.kv_events import KvEventsCollector
from tests.integration.kvevents.rig import (
    CLEARED,
    FAST,
    IMPATIENT,
    Engine,
    WatchedView,
    removed,
    running,
    stored,
)
from tests.unit.core.test_endpoint_picker import SETTINGS

A, B = EndpointId("a"), EndpointId("b", 1)


def observe(
    engines: dict[EndpointId, Engine],
    settings: ManagerSettings = FAST,
    replay: bool = True,
    limits: StreamLimits | None = None,
) -> tuple[WatchedView, KvEventsManager]:
    view = WatchedView(limits)
    decoder = choose_decoder(choose_index().implementation)  # as the picker itself does
    manager = KvEventsManager(view, settings, decode=decoder.decode)
    for endpoint, engine in engines.items():
        view.add_endpoint(endpoint, has_replay=replay)
        manager.add_endpoint(endpoint, engine.source(replay))
    return view, manager


async def live(view: WatchedView, engine: Engine, endpoint: EndpointId = A) -> None:
    await engine.subscribed()
    await view.until(lambda: view.state(endpoint) is ClaimState.LIVE)


@pytest.mark.parametrize("corrupt", [b"\x93 this is no batch", bytes(MAX_PAYLOAD_BYTES + 1)])
async def test_s_c01_a_corrupt_batch_costs_neither_the_socket_nor_later_batches(
    new_engine, corrupt: bytes
) -> None:
    engine = new_engine()
    view, manager = observe({A: engine})
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 4))
        await view.until(lambda: view.depth(A) == 4)
        await engine.publish(raw=corrupt)
        await view.until(lambda: view.state(A) is ClaimState.PARTIAL)  # at once, not with the next batch
        assert view.depth(A) == 0
        await engine.publish(stored(0, 2))
        await view.until(lambda: view.depth(A) > 0)
        assert view.depth(A) == 2  # what the corrupt batch removed is unknown: only later facts count
        await engine.publish(stored(2, 3))
        await view.until(lambda: view.depth(A) == 5)
    counters = manager.counters(A)
    assert (counters.connects, counters.disconnects) == (1, 0)
    assert counters.undecodable_batches == 2  # live, and again in the replay
    assert view.stats(A).counters.undecodable_batches == 2


async def test_s_c02_both_encodings_arrive_and_silence_in_spite_of_traffic_shows(new_engine) -> None:
    engine, mute = new_engine(), new_engine()
    view, manager = observe({A: engine, B: mute})
    as_list = ["BlockStored", [3, 4], 2, list(range(8, 16)), 4, None, "GPU"]
    async with running(manager):
        await live(view, engine, A)
        await live(view, mute, B)
        await engine.publish(stored(0, 2), as_list, {"type": "Future", "x": 1}, ["OtherFuture"])
        await engine.publish(stored(4, 1, surplus={"a": [1]}))
        await mute.publish(["StoredInAnotherWay", 1], {"type": "RemovedInAnotherWay"})
        await view.until(lambda: view.depth(A) == 5 and view.stats(B).counters.unknown_events == 2)
    assert view.stats(A).counters.unknown_events == 2
    assert not view.stats(A).deaf
    assert view.stats(B).deaf


@pytest.mark.parametrize("plain", ["none", "all", "mixed"])
async def test_s_c03_replayed_messages_with_and_without_topic(new_engine, plain: str) -> None:
    """And the topic that claims to be another endpoint is not believed."""
    engine, other = new_engine(topic=b"kv@b"), new_engine(topic=b"kv@b")
    engine.plain_replay = lambda seq: plain == "all" or (plain == "mixed" and seq % 2 == 0)
    for block in range(6):
        await engine.publish(stored(block))
    view, manager = observe({A: engine, B: other})
    async with running(manager):
        await live(view, engine, A)
        await live(view, other, B)
        assert (view.depth(A), view.depth(B)) == (6, 0)
    assert engine.requests == [0]
    counters = manager.counters(A)
    assert (counters.replayed_messages, counters.malformed_messages) == (6, 0)
    match = view.match_of(A)
    assert (match.state, match.known_empty_start) == (ClaimState.LIVE, True)


async def test_s_c04_a_late_replay_never_brings_a_removed_block_back(new_engine) -> None:
    """The gap holds Stored(3), the live batch is Removed(3), the first replay answers too late."""
    engine = new_engine()
    view, manager = observe({A: engine}, IMPATIENT, limits=StreamLimits(failed_replays=50))
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 3))
        await view.until(lambda: view.depth(A) == 3)
        engine.may_answer.clear()
        await engine.publish(stored(3), lost=True)
        await engine.publish(removed(3))
        await view.until(lambda: view.state(A) is ClaimState.SYNCING)
        assert view.depth(A) == 0
        await view.until(lambda: view.stats(A).counters.failed_replays >= 1)
        assert view.stats(A).index.device_blocks == 0
        engine.may_answer.set()  # all requests so far are answered now, most of them to nobody
        await view.until(lambda: view.state(A) is ClaimState.LIVE)
        assert view.depth(A) == 3
        await engine.publish(stored(4))
        await view.until(lambda: view.stats(A).counters.applied_batches >= 4 and view.depth(A) == 3)
    assert max(view.depths_seen) == 3
    assert manager.counters(A).replays_failed >= 1


async def test_s_c05_all_cleared_empties_every_tier_of_that_endpoint_only(new_engine) -> None:
    engine, other = new_engine(), new_engine()
    view, manager = observe({A: engine, B: other})
    async with running(manager):
        await live(view, engine, A)
        await live(view, other, B)
        for one in (engine, other):
            await one.publish(stored(0, 26), stored(0, 26, tier="CPU"))
        await view.until(lambda: view.match_of(A).cpu_blocks == view.match_of(B).cpu_blocks == 26)
        await engine.publish(CLEARED)
        await view.until(lambda: view.depth(A) == 0)
        match = view.match_of(A)
        assert (match.blocks, match.device_blocks, match.cpu_blocks) == (0, 0, 0)
        assert match.state is ClaimState.LIVE
        match = view.match_of(B)
        assert (match.blocks, match.device_blocks, match.cpu_blocks) == (26, 26, 26)


async def test_s_c17_messages_of_another_shape_harm_nobody_else(new_engine) -> None:
    engine, healthy = new_engine(), new_engine()
    view, manager = observe({A: engine, B: healthy})
    bad: list[list[bytes]] = [
        [b"x"],
        [b"t", b"\0" * 4, b"p"],
        [b"t", b"\0" * 8, b"p", b"more"],
        [b"t", b"\xff" * 8, b""],
    ]
    async with running(manager):
        await live(view, engine, A)
        await live(view, healthy, B)
        for frames in bad:
            await engine.pub.send_multipart(frames)
        await engine.publish(stored(0, 2))
        await healthy.publish(stored(0, 7))
        await view.until(lambda: view.depth(A) == 2 and view.depth(B) == 7)
    assert manager.counters(A).malformed_reasons == {"frames": 2, "sequence": 2}
    assert manager.counters(A).malformed_messages == 4
    assert not manager.counters(A).unusable  # one message could be read
    assert manager.counters(B).malformed_messages == 0


@pytest.mark.parametrize("frames", [[b"p"], [b"t", b"\0" * 4, b"p"], [b"t", b"\0" * 8, b"p", b"more"]])
async def test_s_c17_an_endpoint_without_usable_events_shows_on_the_dashboard(
    new_engine, frames: list[bytes]
) -> None:
    engine, healthy = new_engine(), new_engine()
    view, manager = observe({A: engine, B: healthy})
    picker = EndpointPicker(SETTINGS, view)
    for endpoint, port in ((A, 1), (B, 2)):
        picker.upsert_endpoint(Endpoint(endpoint, "127.0.0.1", port))
    registry = CollectorRegistry()
    registry.register(KvEventsCollector(picker, manager, clock=lambda: 7.0))
    async with running(manager):
        await live(view, engine, A)
        await live(view, healthy, B)
        for _ in range(3):
            await engine.pub.send_multipart(frames)
        await engine.pub.send_multipart([b"t", (9).to_bytes(8, "big"), b"\x93 no batch"])
        await healthy.publish(stored(0, 2))
        await view.until(lambda: view.depth(B) == 2 and view.stats(A).counters.undecodable_batches == 1)
        page = generate_latest(registry).decode()
    reason = "sequence" if len(frames) == 3 else "frames"
    assert f'kvpull_epp_kv_event_messages_total{{endpoint="a/0",outcome="malformed_{reason}"}} 3.0' in page
    assert 'kvpull_epp_kv_events_unusable{endpoint="a/0"} 1.0' in page
    assert 'kvpull_epp_kv_events_unusable{endpoint="b/1"} 0.0' in page


async def test_a_restarted_index_has_no_claim_until_the_replay_came(new_engine) -> None:
    engine = new_engine()
    await engine.publish(stored(0, 8))
    await engine.publish(removed(7))
    engine.may_answer.clear()
    view, manager = observe({A: engine})
    async with running(manager):
        await engine.subscribed()
        await engine.until(lambda e: e.requests == [0])
        await engine.publish(stored(7))
        await engine.publish(stored(8))
        await view.until(lambda: view.stats(A).held_batches == 2)
        assert view.state(A) is ClaimState.SYNCING
        assert view.match_of(A).cached_tokens == 0
        engine.may_answer.set()
        await view.until(lambda: view.state(A) is ClaimState.LIVE)
        assert view.depth(A) == 9
    assert set(view.depths_seen) == {0, 9}


async def test_an_index_that_missed_the_beginning_claims_a_lower_bound(new_engine) -> None:
    engine = new_engine()
    for block in range(6):
        await engine.publish(stored(block))
    await engine.publish(removed(0))
    await engine.publish(stored(0, 2))
    engine.buffer = engine.buffer[6:]
    view, manager = observe({A: engine})
    async with running(manager):
        await view.until(lambda: view.state(A) is ClaimState.PARTIAL)
        assert view.depth(A) == 2
        assert not view.match_of(A).known_empty_start


async def test_a_gap_is_repaired_by_replay(new_engine) -> None:
    engine = new_engine()
    view, manager = observe({A: engine})
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 2))
        await engine.publish(stored(2, 2), lost=True)
        await engine.publish(removed(1), lost=True)
        await engine.publish(stored(1), stored(4, 1))
        await view.until(lambda: view.depth(A) == 5)
    assert engine.requests == [0, 0]  # the second one batch before the gap
    stats = view.stats(A)
    assert (stats.state, stats.counters.gaps, stats.counters.clears) == (ClaimState.LIVE, 1, 0)
    assert 2 in view.depths_seen
    assert max(view.depths_seen) == 5


async def test_a_failed_replay_clears_and_the_next_one_repairs(new_engine) -> None:
    engine = new_engine()
    view, manager = observe({A: engine}, IMPATIENT, limits=StreamLimits(failed_replays=50))
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 4))
        await view.until(lambda: view.depth(A) == 4)
        engine.may_answer.clear()
        await engine.publish(removed(0), lost=True)
        await engine.publish(removed(3))
        await view.until(lambda: view.stats(A).counters.failed_replays >= 1)
        assert view.stats(A).index.device_blocks == 0
        assert view.depth(A) == 0
        engine.may_answer.set()
        await view.until(lambda: view.state(A) is ClaimState.LIVE)
        assert view.stats(A).index.device_blocks == 2
        assert view.depth(A) == 0


async def test_a_replay_socket_that_never_answers_leaves_a_lower_bound_from_live_events(new_engine) -> None:
    engine = new_engine()
    engine.may_answer.clear()
    view, manager = observe({A: engine}, IMPATIENT, limits=StreamLimits(failed_replays=2))
    async with running(manager):
        await engine.subscribed()
        await view.until(lambda: view.stats(A).counters.failed_replays == 2)
        assert view.state(A) is ClaimState.UNKNOWN
        engine.next_seq = 40
        await engine.publish(stored(0, 3))
        await view.until(lambda: view.state(A) is ClaimState.PARTIAL)
        assert view.depth(A) == 3


async def test_without_a_replay_socket(new_engine) -> None:
    engine = new_engine()
    engine.next_seq = 10
    view, manager = observe({A: engine}, replay=False)
    async with running(manager):
        await engine.subscribed()
        await engine.publish(stored(5))
        await view.until(lambda: view.stats(A).counters.orphan_blocks == 1)
        assert view.state(A) is ClaimState.UNKNOWN
        await engine.publish(stored(0, 5))
        await view.until(lambda: view.depth(A) == 6)
        assert view.state(A) is ClaimState.PARTIAL
        await engine.publish(removed(0), lost=True)
        await engine.publish(stored(0, 1))
        await view.until(lambda: view.depth(A) == 1)
    assert engine.requests == []


async def test_a_restarted_engine_on_the_same_address_is_forgotten(new_engine) -> None:
    engine = new_engine()
    view, manager = observe({A: engine})
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 9))
        await view.until(lambda: view.depth(A) == 9)
        await engine.restart()
        await view.until(lambda: manager.counters(A).disconnects >= 1)
        assert view.depth(A) == 0
        await live(view, engine)
        assert view.stats(A).index.device_blocks == 0
        assert view.match_of(A).known_empty_start
        await engine.publish(stored(0, 2))
        await view.until(lambda: view.depth(A) == 2)
    assert manager.counters(A).connects >= 2


async def test_a_short_disconnect_from_the_same_process_keeps_what_was_known(new_engine) -> None:
    engine = new_engine()
    view, manager = observe({A: engine})
    async with running(manager):
        await live(view, engine)
        await engine.publish(stored(0, 9))
        await view.until(lambda: view.depth(A) == 9)
        await engine.close()
        await view.until(lambda: manager.counters(A).disconnects >= 1)
        assert view.depth(A) == 0
        engine.keep(removed(8))
        engine.open()
        await live(view, engine)
        assert view.depth(A) == 8
    assert view.stats(A).counters.clears == 0
    assert engine.requests[-1] == 0


async def test_recorded_payload_bytes_survive_the_whole_way(new_engine) -> None:
    """Bytes hashes, extra keys and salts through a socket, not only through the codec."""
    engine = new_engine()
    names = [bytes(24) + (i + 1).to_bytes(8, "big") for i in range(3)]
    event = {**stored(0, 3), "block_hashes": names, "extra_keys": [None] * 3}
    view, manager = observe({A: engine})
    async with running(manager):
        await live(view, engine)
        await engine.publish(raw=msgspec.msgpack.encode([1.0, [event], 0]))
        await engine.publish(stored(0, 2, tier="CPU", token_ids=[], block_size=0, parent_block_hash=None))
        await view.until(lambda: view.match_of(A).cpu_blocks == 2)
        assert view.match_of(A).device_blocks == 3
