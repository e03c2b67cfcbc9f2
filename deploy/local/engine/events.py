"""KV events in vLLM 0.32's format: collected in the order of the cache's changes, sent in batches.

Frames: topic, 8-byte big-endian sequence from 0, msgpack `[ts, [event maps], rank]`. The replay
socket answers `[b"", start]` with the batches from `start` that are still buffered and an end marker.
The publisher must never block the engine: PUB drops for slow subscribers, replay repairs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from deploy.local.engine.hashing import Block, event_hash
from engine_plugin import wire

END_OF_REPLAY: Final = (b"", b"\xff" * 8, b"")
_BUFFERED_BATCHES: Final = 10_000


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def stored(blocks: Sequence[Block], medium: str, block_size: int, *, with_keys: bool = True) -> BlockStored:
    """One event for a run of blocks, each the parent of the next."""
    parent = blocks[0].parent
    keys = [list(block.extra_keys) if block.extra_keys else None for block in blocks]
    return BlockStored(
        block_hashes=[event_hash(block.name) for block in blocks],
        parent_block_hash=None if parent is None else event_hash(parent),
        token_ids=[token for block in blocks for token in block.tokens],
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=blocks[0].lora_name,
        extra_keys=keys if with_keys else None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def chain_runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Split into runs in which every block follows the one before."""
    result: list[list[Block]] = []
    for block in blocks:
        if result and result[-1][-1].name == block.parent:
            result[-1].append(block)
        else:
            result.append([block])
    return result


class EventLog:
    """Changes of both tiers since the last batch, in order.

    `stock_cpu_events`: CPU stores as a stock engine sends them, one event a block, in scrambled
    order, without extra keys; otherwise as our plugin does, in chain order and complete.
    """

    def __init__(self, *, block_size: int, stock_cpu_events: bool) -> None:
        self._block_size = block_size
        self._stock_cpu_events = stock_cpu_events
        self._events: list[KvEvent] = []
        self._cpu: dict[bytes, Block] = {}  # what the CPU tier holds, as announced
        self._scramble = random.Random(0)

    def device_stored(self, blocks: Sequence[Block]) -> None:
        for run in chain_runs(blocks):
            self._events.append(stored(run, wire.MEDIUM_DEVICE, self._block_size))

    def cpu_stored(self, blocks: Sequence[Block]) -> None:
        self._cpu.update((block.name, block) for block in blocks)
        self._announce_cpu(blocks)

    def _announce_cpu(self, blocks: Sequence[Block]) -> None:
        if not self._stock_cpu_events:
            for run in chain_runs(blocks):
                self._events.append(stored(run, wire.MEDIUM_CPU, self._block_size))
            return
        for block in self._scramble.sample(blocks, len(blocks)):
            self._events.append(stored([block], wire.MEDIUM_CPU, self._block_size, with_keys=False))

    def removed(self, names: Sequence[bytes], medium: str) -> None:
        if medium == wire.MEDIUM_CPU:
            for name in names:
                self._cpu.pop(name, None)
        if names:
            self._events.append(BlockRemoved([event_hash(name) for name in names], medium, group_idx=0))

    def cleared(self, *, cpu_too: bool) -> None:
        """The event empties every tier, so what the CPU tier still holds is announced again."""
        self._events.append(AllBlocksCleared())
        if cpu_too:
            self._cpu.clear()
        self._announce_cpu(self._chains())

    def _chains(self) -> list[Block]:
        """The CPU tier's blocks, every parent before its children and chains in one piece."""
        children: dict[bytes | None, list[Block]] = {}
        for block in self._cpu.values():
            children.setdefault(block.parent if block.parent in self._cpu else None, []).append(block)
        ordered: list[Block] = []
        stack = children.get(None, [])[::-1]
        while stack:
            ordered.append(stack.pop())
            stack.extend(children.get(ordered[-1].name, ()))
        return ordered

    def take(self) -> list[KvEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events


class EventPublisher:
    """The two sockets. `replay_released` can be cleared to hold replay answers back (a fault)."""

    def __init__(self, *, topic: str, rank: int = 0) -> None:
        self._topic = topic.encode()
        self._rank = rank
        self._context = zmq.asyncio.Context()
        self._live: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._next_sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=_BUFFERED_BATCHES)
        self._encoder = msgspec.msgpack.Encoder()
        self.replay_released = asyncio.Event()
        self.replay_released.set()
        self.replays_answered = 0

    def bind(self, host: str, events_port: int, replay_port: int) -> tuple[int, int]:
        """Bind both; the real ports. Raises OSError (address in use)."""
        self._live = zmq.Socket(zmq.Context(self._context), zmq.PUB)
        self._live.set_hwm(_BUFFERED_BATCHES)
        self._live.linger = 0
        self._replay = self._context.socket(zmq.ROUTER)
        # whole buffer fits, so that a replay is never cut short by the socket's own limit
        self._replay.sndhwm = _BUFFERED_BATCHES + 1
        self._replay.linger = 0
        return _bind(self._live, host, events_port), _bind(self._replay, host, replay_port)

    @property
    def batches(self) -> int:
        return self._next_sequence

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send a batch; nothing is sent for none."""
        if not events or self._live is None:
            return
        payload = self._encoder.encode([time.time(), events, self._rank])
        sequence = self._next_sequence
        self._next_sequence += 1
        self._buffer.append((sequence, payload))
        self._live.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    async def run(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            raise RuntimeError("bind comes first")
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                await self.replay_released.wait()
                await self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, start: int) -> None:
        for sequence, payload in list(self._buffer):
            if sequence >= start:
                await socket.send_multipart((peer, b"", self._topic, sequence.to_bytes(8, "big"), payload))
        await socket.send_multipart((peer, b"", *END_OF_REPLAY))
        self.replays_answered += 1

    def close(self) -> None:
        for socket in (self._live, self._replay):
            if socket is not None:
                socket.close()
        self._context.term()


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
