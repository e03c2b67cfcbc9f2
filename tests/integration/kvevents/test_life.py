"""Start, stop, endpoints that come and go, bounds: of the manager and its thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import zmq

from engine_plugin.identity import EndpointId
from epp.core.types import ClaimState
from epp.kvevents.hand_over import HandOver, HandOverLimits
from epp.kvevents.link import EventSource, Received, SocketSettings
from epp.kvevents.manager import KvEventsManager
from tests.integration.kvevents.rig import FAST, HOST, WAIT_S, WatchedView, running, stored

A, B = EndpointId("a"), EndpointId("b")


def event_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvevents"]


async def test_stop_ends_the_thread_and_a_second_run_works(new_engine) -> None:
    engine = new_engine()
    view = WatchedView()
    manager = KvEventsManager(view, FAST)
    view.add_endpoint(A, has_replay=True)
    manager.add_endpoint(A, engine.source())
    await engine.publish(stored(0, 3))
    for _ in range(2):
        async with running(manager):
            await engine.subscribed()
            await view.until(lambda: view.depth(A) == 3)
            assert len(event_threads()) == 1
        assert event_threads() == []
        assert manager.running_replays == 0


async def test_endpoints_come_and_go_while_it_runs(new_engine) -> None:
    first, second = new_engine(), new_engine()
    view = WatchedView()
    manager = KvEventsManager(view, FAST)
    async with running(manager):
        for engine, blocks in ((first, 2), (second, 5)):
            await engine.publish(stored(0, blocks))
            view.add_endpoint(A, has_replay=True)
            manager.add_endpoint(A, engine.source())  # the second time: another address, same name
            await engine.subscribed()
            await view.until(lambda blocks=blocks: view.depth(A) == blocks)
        manager.remove_endpoint(A)
        view.remove_endpoint(A)
        manager.remove_endpoint(A)
        view.add_endpoint(B, has_replay=True)
        manager.add_endpoint(B, first.source())
        await view.until(lambda: view.depth(B) == 2)
        assert view.depth(A) == 0
    with pytest.raises(KeyError):
        manager.counters(A)


async def test_a_new_address_for_a_known_endpoint_takes_its_claim_at_once(new_engine) -> None:
    old, new = new_engine(), new_engine()
    await old.publish(stored(0, 6))
    await new.publish(stored(0, 1))
    view = WatchedView()
    manager = KvEventsManager(view, FAST)
    view.add_endpoint(A, has_replay=True)
    manager.add_endpoint(A, old.source())
    async with running(manager):
        await view.until(lambda: view.depth(A) == 6)
        manager.add_endpoint(A, old.source())
        assert view.depth(A) == 6
        manager.add_endpoint(A, new.source())
        assert view.depth(A) == 0
        await view.until(lambda: view.depth(A) == 1)
    assert max(view.depths_seen[-3:]) == 1


async def test_replays_run_a_few_at_a_time_and_all_get_their_turn(new_engine) -> None:
    engines = {EndpointId("pod", rank): new_engine() for rank in range(6)}
    view = WatchedView()
    manager = KvEventsManager(view, replace(FAST, concurrent_replays=2))
    for endpoint, engine in engines.items():
        await engine.publish(stored(0, 4))
        engine.may_answer.clear()
        view.add_endpoint(endpoint, has_replay=True)
        manager.add_endpoint(endpoint, engine.source())
    async with running(manager):
        await view.until(lambda: all(manager.counters(e).connects for e in engines))
        assert manager.running_replays == 2
        assert sum(manager.counters(e).replays_started for e in engines) == 2
        for engine in engines.values():
            engine.may_answer.set()
        await view.until(lambda: all(view.depth(e) == 4 for e in engines))
    assert all(manager.counters(e).replays_finished == 1 for e in engines)


async def test_a_replay_storm_passes_through_a_small_hand_over(new_engine) -> None:
    """A replay that brings more than may wait is cut, and asked for again from where it got to."""
    engine = new_engine()
    for block in range(3_000):
        engine.keep(stored(block))
    view = WatchedView()
    limits = HandOverLimits(items=8, size_bytes=4_096, most_bytes=65_536)
    manager = KvEventsManager(view, replace(FAST, hand_over=limits))
    view.add_endpoint(A, has_replay=True)
    manager.add_endpoint(A, engine.source())
    backlogs: list[int] = []
    async with running(manager):
        # looked at when something was applied: a loop that spins would keep the receiving thread from the GIL
        await view.until(lambda: backlogs.append(manager.backlog) or view.state(A) is ClaimState.LIVE)
        assert view.match_of(A, blocks=3_000).blocks == 3_000
    # messages of 512 bytes and more, plus what carries no bytes: link and replay changes
    assert max(backlogs) <= 65_536 // 512 + 3
    counters = manager.counters(A)
    assert counters.replays_failed == 0
    assert counters.replays_cut > 0
    assert view.stats(A).counters.clears == 0  # nothing of it was heard in vain


async def test_an_address_that_does_not_answer_disturbs_nobody(new_engine) -> None:
    engine = new_engine()
    await engine.publish(stored(0, 2))
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        closed = probe.bind_to_random_port(f"tcp://{HOST}")
    view = WatchedView()
    manager = KvEventsManager(view, FAST)
    for endpoint, source in ((A, EventSource(HOST, closed, closed)), (B, engine.source())):
        view.add_endpoint(endpoint, has_replay=True)
        manager.add_endpoint(endpoint, source)
    async with running(manager):
        await view.until(lambda: view.depth(B) == 2)
        assert view.state(A) is ClaimState.UNKNOWN
        assert manager.counters(A).connects == 0


@pytest.mark.parametrize(
    ("host", "port", "replay"), [("", 1, 1), ("a b", 1, 1), ("h", 0, 1), ("h", 1, 65_536)]
)
def test_what_cannot_be_an_address_is_refused_at_once(host: str, port: int, replay: int) -> None:
    with pytest.raises(ValueError, match=r"host name|out of range"):
        EventSource(host, port, replay)


def test_addresses_of_both_families() -> None:
    assert EventSource("127.0.1.1", 5557).address(5557) == "tcp://127.0.1.1:5557"
    assert EventSource("fd00::1", 5557).address(5557) == "tcp://[fd00::1]:5557"
    assert EventSource("h", 5557, 0).has_replay is False


async def test_a_dead_receiving_thread_ends_the_component(new_engine) -> None:
    broken = replace(FAST, sockets=SocketSettings(heartbeat_s=float("nan")))
    manager = KvEventsManager(WatchedView(), broken)
    manager.add_endpoint(A, new_engine().source())
    with pytest.raises(RuntimeError, match="ValueError"):
        await asyncio.wait_for(manager.run(), WAIT_S)
    assert event_threads() == []


async def test_hand_over_wakes_the_loop_and_tells_of_room() -> None:
    rooms: list[int] = []
    queue: HandOver[int | Received] = HandOver(
        asyncio.get_running_loop(), HandOverLimits(items=4), on_room=lambda: rooms.append(1)
    )
    seen: list[int] = []
    total = 5_000
    fed = threading.Event()

    def feed() -> None:
        for i in range(total):
            while queue.is_full():
                fed.wait(0.001)
            queue.put(i, 1)
            if i % 3 == 2 or queue.is_full() or i == total - 1:
                queue.announce()

    thread = threading.Thread(target=feed)
    thread.start()
    async with asyncio.timeout(WAIT_S * 2):
        while len(seen) < total:
            await queue.ready.wait()
            while (item := queue.take()) is not None:
                assert isinstance(item, int)
                seen.append(item)
                assert len(queue) <= 4
    await asyncio.to_thread(thread.join)
    assert seen == list(range(total))
    assert rooms
    assert (len(queue), queue.size_bytes) == (0, 0)
