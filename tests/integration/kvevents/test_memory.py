"""What waits is bounded in bytes, whatever an engine sends and however far the loop is behind.

Here the loop is as far behind as can be: the test holds it while the engine sends. All messages of the
engine are one buffer (ZMQ copies nothing on its way out), so the memory that grows is the picker's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import zmq

from engine_plugin.identity import EndpointId
from epp.core.types import ClaimState
from epp.kvevents.framing import END_OF_REPLAY
from epp.kvevents.hand_over import HandOverLimits
from epp.kvevents.link import EventSource, SocketSettings
from epp.kvevents.manager import KvEventsManager
from tests.integration.kvevents.rig import FAST, HOST, WatchedView, payload, running, stored

A = EndpointId("a")
MIB = 1 << 20
LARGE = msgspec.msgpack.encode([1.0, [{"type": "Unheard", "blob": bytes(4 * MIB)}], 0])
MESSAGES = 80  # of 4 MiB
LIMITS = HandOverLimits(size_bytes=32 * MIB, most_bytes=64 * MIB)
SLACK = 64 * MIB  # what the allocator keeps, and one read of each socket
HELD_S = 30.0


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


def frames(seq: int, body: bytes) -> list[bytes]:
    return [b"kv-events", seq.to_bytes(8, "big"), body]


def holding_the_loop(comes_true: Callable[[], bool], for_s: float = HELD_S) -> bool:
    """Whether it comes true while the loop does nothing at all."""
    moment = threading.Event()
    for _ in range(int(for_s * 100)):
        if comes_true():
            return True
        moment.wait(0.01)
    return comes_true()


@pytest.mark.parametrize("live_hwm", [SocketSettings().live_hwm, 4_096])
async def test_a_flood_of_large_live_messages_stays_outside(live_hwm: int) -> None:
    """The control: with a queue of 4,096 messages all of it comes in."""
    settings = replace(FAST, hand_over=LIMITS, sockets=SocketSettings(live_hwm=live_hwm))
    bound = LIMITS.size_bytes + SocketSettings().live_hwm * len(LARGE) + SLACK
    view = WatchedView()
    manager = KvEventsManager(view, settings)
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.linger = pub.sndhwm = 0
        port = pub.bind_to_random_port(f"tcp://{HOST}")
        view.add_endpoint(A, has_replay=False)
        manager.add_endpoint(A, EventSource(HOST, port))
        async with running(manager):
            await view.until(lambda: manager.counters(A).connects == 1)
            assert pub.poll(int(HELD_S * 1000))  # its subscription
            before = resident_bytes()
            for seq in range(MESSAGES):
                pub.send_multipart(frames(seq, LARGE), copy=False)
            assert holding_the_loop(lambda: manager.backlog * len(LARGE) >= LIMITS.size_bytes)
            if live_hwm > MESSAGES:
                assert holding_the_loop(lambda: resident_bytes() - before > bound)
                return
            assert not holding_the_loop(lambda: resident_bytes() - before > bound, for_s=1.0)
            # nothing was lost: the rest waited at the engine
            pub.send_multipart(frames(MESSAGES, payload(MESSAGES, stored(0, 5))))
            await view.until(lambda: view.depth(A) == 5)
            assert view.stats(A).counters.live_batches == MESSAGES + 1


def answer_replays(router: zmq.Socket[bytes], bodies: list[bytes], ends: threading.Event) -> None:
    while not ends.is_set():
        if not router.poll(100):
            continue
        peer, _, start = router.recv_multipart()
        for seq in range(int.from_bytes(start, "big"), len(bodies)):
            router.send_multipart([peer, b"", *frames(seq, bodies[seq])], copy=False)
        router.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])


async def test_a_flood_of_large_replayed_messages_is_cut_and_heard_to_its_end() -> None:
    view = WatchedView()
    manager = KvEventsManager(view, replace(FAST, hand_over=LIMITS))
    ends = threading.Event()
    bodies = [payload(0, stored(0, 5)), *[LARGE] * MESSAGES, payload(MESSAGES + 1, stored(5, 4))]
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub, context.socket(zmq.ROUTER) as router:
        router.linger = router.sndhwm = 0
        source = EventSource(
            HOST, pub.bind_to_random_port(f"tcp://{HOST}"), router.bind_to_random_port(f"tcp://{HOST}")
        )
        engine = threading.Thread(target=answer_replays, args=(router, bodies, ends))
        view.add_endpoint(A, has_replay=True)
        manager.add_endpoint(A, source)
        before = resident_bytes()
        engine.start()
        try:
            async with running(manager):
                await view.until(lambda: manager.running_replays > 0)
                assert holding_the_loop(lambda: manager.backlog * len(LARGE) >= LIMITS.most_bytes)
                assert resident_bytes() - before <= LIMITS.most_bytes + SLACK
                await view.until(lambda: view.state(A) is ClaimState.LIVE)
                assert view.depth(A) == 9
                counters = manager.counters(A)
                assert (counters.replays_failed, counters.replays_finished) == (0, 1)
                assert counters.replays_cut > 0
        finally:
            ends.set()
            engine.join(HELD_S)
