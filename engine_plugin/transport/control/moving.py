"""One move a peer has asked for, from its acceptance to its answer: its turn, the writing, the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from engine_plugin.protocol import Declined, Ended, Move, MoverInfo, Progress
from engine_plugin.transport.control.leases import GrantedLease
from engine_plugin.transport.control.producer import Producer
from engine_plugin.transport.control.turns import Ticket
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.messages import StartMove

Start = Callable[[], tuple[Mover, MoverInfo] | Declined]


class ServedMove:
    """Runs once. `start` is asked when the move's turn comes: who writes, and where to, or why not now."""

    def __init__(
        self,
        producer: Producer,
        request: Move,
        granted: GrantedLease,
        ticket: Ticket,
        *,
        peer_label: str,
        start: Start,
        send: Callable[[msgspec.Struct], None],
    ) -> None:
        self._producer = producer
        self._request = request
        self._granted = granted
        self._ticket = ticket
        self._label = peer_label
        self._start = start
        self._send = send
        self._mover: Mover | None = None
        self._cancelled = asyncio.Event()
        self._written_chunks = 0

    def cancel(self) -> None:
        """Stop; the answer still comes, when what was posted has resolved."""
        self._cancelled.set()
        if self._mover is not None:
            self._mover.cancel(self._request.tag)
        elif not self._ticket.granted:
            self._producer.moves.leave(self._ticket)

    async def run(self) -> None:
        """Answers with `Declined` or `Ended`, whatever happens."""
        producer = self._producer
        try:
            patience_s = min(self._request.patience_ms / 1000, producer.limits.queue_s)
            if await producer.moves.wait(self._ticket, patience_s):
                self._send(await self._write())
            elif self._cancelled.is_set():
                self._send(Ended(self._request.id, "cancelled", True, 0))
            else:
                self._send(Declined(self._request.id, "limit", "moves_in_flight"))
        finally:
            producer.moves.leave(self._ticket)

    async def _write(self) -> Ended | Declined:
        request, producer, stats = self._request, self._producer, self._producer.stats
        if self._cancelled.is_set():
            return Ended(request.id, "cancelled", True, 0)
        started = self._start()
        if isinstance(started, Declined):
            return started
        mover, info = started
        if await self._throttled():
            return Ended(request.id, "cancelled", True, 0)
        self._mover = mover
        self._send(Progress(request.id, 0))  # its turn has come
        faults = producer.faults
        hold = producer.run(_hold(faults, mover, request.tag), "p2p-hold") if faults is not None else None
        stats.moves_out += 1
        try:
            on_held = faults.holding.set if faults is not None else _ignore
            ended = await mover.write(self._order(info), self._on_chunks, on_held)
        finally:
            stats.moves_out -= 1
            if hold is not None:
                hold.cancel()
        stats.served_bytes[self._label] += ended.written_bytes
        stats.served_blocks += ended.written_bytes // producer.identity.block_bytes
        reason = "mover_down" if mover.gone.done() and ended.reason == "failed" else ended.reason
        detail = ended.detail[:256]
        return Ended(request.id, reason, ended.settled, ended.written_bytes, detail, packed=ended.packed)

    def _order(self, info: MoverInfo) -> StartMove:
        request, limits, faults = self._request, self._producer.limits, self._producer.faults
        size = len(request.slots) * self._producer.identity.block_bytes
        fits = request.window is not None and request.window + size <= info.inbox_bytes
        return StartMove(
            tag=request.tag,
            agent=info.agent,
            source_slots=list(self._granted.lease.slots[: len(request.slots)]),
            target_slots=request.slots,
            target_base=info.base_address,
            chunk_bytes=limits.chunk_bytes,
            chunks_in_flight=limits.chunks_in_flight,
            hold_after_chunks=faults.hold_after_chunks if faults is not None else None,
            window_address=info.inbox_address + request.window if fits and request.window is not None else 0,
        )

    def _on_chunks(self, chunks: int) -> None:
        self._producer.stats.chunks_written += chunks - self._written_chunks
        self._written_chunks = chunks
        self._send(Progress(self._request.id, chunks))

    async def _throttled(self) -> bool:
        """Under a fault, as long as a slow link would take; whether it was cancelled meanwhile."""
        faults = self._producer.faults
        if faults is None or not faults.throttle_bytes_per_s:
            return False
        moving_bytes = len(self._request.slots) * self._producer.identity.block_bytes
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), moving_bytes / faults.throttle_bytes_per_s)
        return self._cancelled.is_set()


def _ignore() -> None:
    """No fault is injected."""


async def _hold(faults: Faults, mover: Mover, tag: str) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await faults.proceed.wait()
        mover.proceed(tag)
