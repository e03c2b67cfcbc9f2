"""A subscriber of KV events for tests: real sockets, frames checked, cache contents followed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from deploy.local.engine.hashing import event_hash
from tests.integration.engine.rig import BOUND_S, EngineClient

Batch = tuple[int, bytes]  # sequence, payload


@dataclass(slots=True)
class Mirror:
    """What a listener knows of an engine's tiers."""

    tiers: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set()})
    stored: int = 0
    removed: int = 0
    cleared: int = 0

    def apply(self, payload: bytes) -> None:
        for event in events_of(payload):
            match event["type"]:
                case "BlockStored":
                    assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                    self.tiers[event["medium"]].update(event["block_hashes"])
                    self.stored += len(event["block_hashes"])
                case "BlockRemoved":
                    assert self.tiers[event["medium"]] >= set(event["block_hashes"])
                    self.tiers[event["medium"]].difference_update(event["block_hashes"])
                    self.removed += len(event["block_hashes"])
                case "AllBlocksCleared":
                    self.tiers = {"GPU": set(), "CPU": set()}
                    self.cleared += 1


def events_of(payload: bytes) -> list[dict[str, Any]]:
    stamp, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(stamp, float)
    assert rank == 0
    return list(events)


def truth(engine: EngineClient) -> dict[str, set[int]]:
    """What the engine's own tables hold, in the events' terms."""
    cache = engine.running.engine.parts.cache
    return {
        "GPU": {event_hash(name) for name in cache.device.names()},
        "CPU": {event_hash(name) for name in cache.cpu.names()},
    }


class Subscriber:
    """Live and replay socket of one engine. Create inside a running loop; `close` at the end."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(f"tcp://{engine.host}:{engine.running.events_port}")
        self._live.subscribe(b"")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://{engine.host}:{engine.running.replay_port}")

    def close(self) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    async def joined(self) -> int:
        """Make the engine publish until a batch arrives live: its sequence."""
        for _ in range(100):
            await self._engine.reset()
            if await self._live.poll(100):
                last = (await self.next())[0]
                while await self._live.poll(100):
                    last = (await self.next())[0]
                return last
        raise AssertionError("no event arrived")

    async def next(self) -> Batch:
        async with asyncio.timeout(BOUND_S):
            topic, sequence, payload = await self._live.recv_multipart()
        assert topic.startswith(b"kv@")
        assert len(sequence) == 8
        return int.from_bytes(sequence, "big"), payload

    async def live(self, until_sequence: int) -> list[Batch]:
        """Every batch up to and including a sequence."""
        batches = [await self.next()]
        while batches[-1][0] < until_sequence:
            batches.append(await self.next())
        return batches

    async def ask_replay(self, start: int) -> None:
        await self._replay.send_multipart((b"", start.to_bytes(8, "big")))

    async def replay_waits(self) -> bool:
        """Whether no answer has come although the engine had every chance to give one."""
        await self._engine.metrics()
        return not await self._replay.poll(200)

    async def replayed(self) -> list[Batch]:
        """The answer to one replay request, end mark checked."""
        batches: list[Batch] = []
        async with asyncio.timeout(BOUND_S):
            while True:
                empty, topic, sequence, payload = await self._replay.recv_multipart()
                assert empty == b""
                if sequence == b"\xff" * 8:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((int.from_bytes(sequence, "big"), payload))
