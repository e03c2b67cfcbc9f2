"""An engine's publisher and replay sockets, real ZMQ, with the faults the cases ask for; and a sink
that lets a test wait for what the manager does without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.events import Batch, BatchResult
from epp.core.index_choice import choose_index
from epp.core.prefix_index import PrefixIndex
from epp.core.stream_step import StreamLimits
from epp.core.types import PrefixMatch, SchedulingRequest
from epp.kvevents.framing import END_OF_REPLAY
from epp.kvevents.link import EventSource, SocketSettings
from epp.kvevents.manager import KvEventsManager, ManagerSettings

WAIT_S = 20.0
SIZE = 4
HOST = "127.0.0.1"

FAST = ManagerSettings(
    replay_interval_s=0.0,
    retry_first_s=0.01,
    retry_max_s=0.05,
    sockets=SocketSettings(reconnect_s=0.01, reconnect_max_s=0.05),
)
IMPATIENT = ManagerSettings(
    replay_interval_s=0.0,
    retry_first_s=0.01,
    retry_max_s=0.05,
    sockets=SocketSettings(reconnect_s=0.01, reconnect_max_s=0.05, replay_deadline_s=2.0, replay_idle_s=0.2),
)


def tokens(blocks: int, start: int = 0) -> list[int]:
    return list(range(start * SIZE, (start + blocks) * SIZE))


def stored(first: int, count: int = 1, tier: str = "GPU", **fields: Any) -> dict[str, Any]:
    """Blocks [first, first + count) of the one prompt of these tests, named by number + 1."""
    return {
        "type": "BlockStored",
        "block_hashes": [first + i + 1 for i in range(count)],
        "parent_block_hash": first or None,
        "token_ids": tokens(count, first),
        "block_size": SIZE,
        "medium": tier,
        **fields,
    }


def removed(block: int, tier: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block + 1], "medium": tier}


CLEARED = {"type": "AllBlocksCleared"}


def payload(seq: int, *events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0 + seq, list(events), 0])


class Engine:
    """XPUB (so that a test can wait for the subscription) and ROUTER on fixed ports."""

    def __init__(self, context: zmq.asyncio.Context, topic: bytes = b"kv-events") -> None:
        self._context = context
        self.topic = topic
        self.buffer: list[tuple[int, bytes]] = []
        self.next_seq = 0
        self.lost_in_replay: set[int] = set()
        self.plain_replay: Callable[[int], bool] = lambda seq: False  # without the topic frame
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.requests: list[int] = []
        self.asked = asyncio.Condition()
        self.answered = 0
        self.events_port = self.replay_port = 0
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self.pub = self._context.socket(zmq.XPUB)
        self.router = self._context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.linger = 0
        self.events_port = _bind(self.pub, self.events_port)
        self.replay_port = _bind(self.router, self.replay_port)
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for socket, port in ((self.pub, self.events_port), (self.router, self.replay_port)):
            if not socket.closed:
                await _unbind(socket, port)
                socket.close(0)

    async def restart(self) -> None:
        """Another process on the same ports, with nothing in its cache."""
        await self.close()
        self.buffer.clear()
        self.next_seq = 0
        self.open()

    def source(self, replay: bool = True) -> EventSource:
        return EventSource(HOST, self.events_port, self.replay_port if replay else None)

    async def subscribed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.pub.recv())[:1] != b"\x01":
                pass

    async def publish(self, *events: Any, lost: bool = False, raw: bytes | None = None) -> int:
        """One batch; `lost`: only the replay buffer has it; `raw`: these bytes as payload."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        body = payload(seq, *events) if raw is None else raw
        self.buffer.append((seq, body))
        if not lost:
            await self.pub.send_multipart([self.topic, seq.to_bytes(8, "big"), body])
        return seq

    def keep(self, *events: Any) -> None:
        """A batch that nobody hears of before the next replay."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.buffer.append((seq, payload(seq, *events)))

    async def _serve(self) -> None:
        while True:
            peer, _, start = await self.router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            async with self.asked:
                self.asked.notify_all()
            await self.may_answer.wait()
            for seq, body in list(self.buffer):
                if seq >= self.requests[-1] and seq not in self.lost_in_replay:
                    topic = [] if self.plain_replay(seq) else [self.topic]
                    await self.router.send_multipart([peer, b"", *topic, seq.to_bytes(8, "big"), body])
            await self.router.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])
            self.answered += 1
            async with self.asked:
                self.asked.notify_all()

    async def until(self, holds: Callable[[Engine], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.asked:
            await self.asked.wait_for(lambda: holds(self))


def _bind(socket: Any, port: int) -> int:
    if port:
        socket.bind(f"tcp://{HOST}:{port}")
        return port
    return int(socket.bind_to_random_port(f"tcp://{HOST}"))


async def _unbind(socket: Any, port: int) -> None:
    """Returns when the port is free: ZMQ closes listeners in a thread of its own."""
    monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
    socket.unbind(f"tcp://{HOST}:{port}")
    async with asyncio.timeout(WAIT_S):
        await monitor.recv_multipart()
    socket.disable_monitor()
    monitor.close(0)


class WatchedView(CacheView):
    """The real view, which tells whoever waits that it was called."""

    def __init__(self, limits: StreamLimits | None = None, index: PrefixIndex | None = None) -> None:
        super().__init__(choose_index().make(b"i" * 16) if index is None else index, limits)
        self._changed = asyncio.Event()
        self.depths_seen: list[int] = []

    def _note(self, endpoint: EndpointId, answer: BatchResult) -> BatchResult:
        self.depths_seen.append(self.depth(endpoint))
        self._changed.set()
        return answer

    def on_connect(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        return self._note(endpoint, super().on_connect(endpoint, now_s))

    def on_disconnect(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        return self._note(endpoint, super().on_disconnect(endpoint, now_s))

    def on_batch(
        self, endpoint: EndpointId, seq: int, batch: Batch | None, now_s: float, replayed: bool = False
    ) -> BatchResult:
        return self._note(endpoint, super().on_batch(endpoint, seq, batch, now_s, replayed))

    def on_replay_end(self, endpoint: EndpointId, ok: bool, now_s: float) -> BatchResult:
        return self._note(endpoint, super().on_replay_end(endpoint, ok, now_s))

    def on_replay_cut(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        return self._note(endpoint, super().on_replay_cut(endpoint, now_s))

    def match_of(self, endpoint: EndpointId, blocks: int = 64) -> PrefixMatch:
        return self.match(SchedulingRequest("r", token_ids=tokens(blocks)), [endpoint])[endpoint]

    def depth(self, endpoint: EndpointId, blocks: int = 64) -> int:
        """Blocks that the picker would count on; 0 without a claim."""
        match = self.match_of(endpoint, blocks)
        return match.blocks if match.state.has_claim else 0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def running(manager: KvEventsManager) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(manager.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, WAIT_S)
