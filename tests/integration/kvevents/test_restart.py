"""A publisher dies with frames still under way to us, and an empty engine binds the same ports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import zmq
import zmq.asyncio

from engine_plugin.identity import EndpointId
from epp.core.types import ClaimState
from epp.kvevents.hand_over import HandOverLimits
from epp.kvevents.manager import KvEventsManager
from tests.integration.kvevents.rig import (
    FAST,
    WAIT_S,
    Engine,
    WatchedView,
    payload,
    removed,
    running,
    stored,
)

A = EndpointId("a")
BURST = 900  # below the send bound of a socket, far above the hand-over's
SMALL = replace(FAST, hand_over=HandOverLimits(items=8))


def kill(engine: Engine, context: zmq.asyncio.Context) -> None:
    """As a process ends: what it had published still arrives. Returns when all of it is sent."""
    assert engine._task is not None
    engine._task.cancel()
    engine.pub.linger = int(WAIT_S * 1000)
    engine.pub.close()
    engine.router.close(0)
    context.term()


def doomed_payload(seq: int) -> bytes:
    return payload(seq, stored(0, 9) if seq == 4 + BURST else removed(60))


async def test_the_last_frames_of_a_dead_engine_are_not_its_successors(new_engine) -> None:
    doomed_context = zmq.asyncio.Context()
    doomed = Engine(doomed_context)
    doomed.open()
    view = WatchedView()
    manager = KvEventsManager(view, SMALL)
    view.add_endpoint(A, has_replay=True)
    manager.add_endpoint(A, doomed.source())
    async with running(manager):
        try:
            await doomed.subscribed()
            for _ in range(5):
                await doomed.publish(removed(60))
            await view.until(lambda: view.state(A) is ClaimState.LIVE)
            await view.until(lambda: view.stats(A).counters.applied_batches == 5)
            # the loop does not run from here on, so the burst stays in the receiving socket
            sender = zmq.Socket(shadow=doomed.pub.underlying)
            for seq in range(5, 5 + BURST):
                body = doomed_payload(seq)
                sender.send_multipart([b"t", seq.to_bytes(8, "big"), body])
        finally:
            kill(doomed, doomed_context)
        heir = new_engine()
        await heir.close()
        heir.events_port, heir.replay_port = doomed.events_port, doomed.replay_port
        heir.open()
        await heir.subscribed()
        await view.until(lambda: manager.counters(A).connects == 2)
        await view.until(lambda: view.state(A) is ClaimState.LIVE)
        assert view.depth(A) == 0
        assert view.stats(A).index.device_blocks == 0
        await heir.publish(stored(0, 3))
        await view.until(lambda: view.depth(A) == 3)
    assert manager.counters(A).disconnects == 1


async def test_a_peer_that_hangs_up_again_and_again_is_followed_each_time(new_engine) -> None:
    engine = new_engine()
    view = WatchedView()
    manager = KvEventsManager(view, FAST)
    view.add_endpoint(A, has_replay=True)
    manager.add_endpoint(A, engine.source())
    async with running(manager):
        for process in range(1, 6):
            await engine.subscribed()
            await view.until(lambda process=process: manager.counters(A).connects == process)
            await view.until(lambda: view.state(A) is ClaimState.LIVE)
            await engine.publish(stored(0, process))
            await view.until(lambda process=process: view.depth(A) == process)
            await engine.restart()
            await view.until(lambda process=process: manager.counters(A).disconnects == process)
            assert view.depth(A) == 0
        await asyncio.wait_for(engine.subscribed(), WAIT_S)
