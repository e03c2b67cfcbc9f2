"""The consumer's side of the control channel: one session to one source, many pulls over it by id."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from engine_plugin.identity import Address, format_address
from engine_plugin.protocol import (
    Cancel,
    Declined,
    Ended,
    Found,
    FrameError,
    Lookup,
    Move,
    MoverInfo,
    Ping,
    Pong,
    Prefetch,
    Prefetched,
    Progress,
    Release,
    ServerMessage,
)
from engine_plugin.transport.control.calling import Caller, reach
from engine_plugin.transport.control.channel import Channel, ChannelClosed
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import PrefetchOrder, PullError, PullReason

Answer = Found | Prefetched | Declined  # to a question that is no move

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class MoveCall:
    """A move we asked for. `ended` always resolves; with None when the session ended first."""

    id: int
    tag: str
    slots: tuple[int, ...]
    ended: asyncio.Future[Ended | Declined | None]
    heard_at_s: float
    window: int | None = None  # of our mover's inbox
    chunks: int = 0


class OutboundSession:
    """An accepted session. Create with `connect`; over when `closed` is done."""

    def __init__(
        self, source: Address, channel: Channel, peer: str, limits: Limits, stats: TransportStats
    ) -> None:
        loop = asyncio.get_running_loop()
        self.source = source
        self.peer = peer
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._channel = channel
        self._limits = limits
        self._stats = stats
        self._next_id = 0
        self._asked: dict[int, asyncio.Future[Answer | None]] = {}
        self._moves: dict[int, MoveCall] = {}
        self._told_epoch = 0
        self._reading = asyncio.create_task(self._run(), name=f"p2p-out-{format_address(source)}")
        self._pinging = asyncio.create_task(self._ping(), name=f"p2p-ping-{format_address(source)}")
        stats.sessions_out += 1

    @classmethod
    async def connect(cls, source: Address, caller: Caller) -> OutboundSession:
        """Dial and shake hands within `connect_s` + `handshake_s`. Raises PullError."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        channel, peer = await reach(source, caller)
        caller.stats.session_setup_s.add(loop.time() - started_s)
        return cls(source, channel, peer, caller.limits, caller.stats)

    @property
    def certificate(self) -> bytes | None:
        """What the source has proved to be of the pool with; None over plain text."""
        return self._channel.certificate

    def abort(self) -> None:
        """End the session at once; `closed` follows."""
        self._channel.abort()

    def mover_changed(self, mover: Mover) -> None:
        """Tell the source where to write from now on."""
        if mover.epoch == self._told_epoch:
            return
        self._told_epoch = mover.epoch
        mover.wake()
        self._channel.send(
            MoverInfo(mover.epoch, mover.agent, mover.metadata, mover.base_address, mover.slots, *mover.inbox)
        )

    async def lookup(
        self, kv_request_id: str, hashes: Sequence[bytes], *, wait_s: float, patience_s: float
    ) -> Found | Declined:
        """Ask; the caller bounds the wait, and cancelling takes the question back.

        Raises:
            PullError: DISCONNECTED, or PROTOCOL for an answer that cannot be one to this question.
        """
        wait_ms, patience_ms = int(wait_s * 1000), max(0, int(patience_s * 1000))
        found = await self._ask(
            Lookup(self._new_id(), kv_request_id, list(hashes), wait_ms=wait_ms, patience_ms=patience_ms)
        )
        if isinstance(found, Prefetched):
            raise PullError(PullReason.PROTOCOL, "the answer to a prefetch where one to a look-up was due")
        return found

    async def prefetch(self, order: PrefetchOrder) -> Prefetched | Declined:
        """Have the peer pull; as `lookup`, but what has been ordered cannot be taken back."""
        host, port = order.source
        ended = await self._ask(
            Prefetch(
                self._new_id(),
                order.kv_request_id,
                host,
                port,
                list(order.hashes),
                max(0, int(order.deadline_s * 1000)),
                list(order.tokens),
                order.cache_salt,
                order.lora_name,
            )
        )
        if isinstance(ended, Found):
            self.release(ended.lease_id)
            raise PullError(PullReason.PROTOCOL, "the answer to a look-up where one to a prefetch was due")
        return ended

    async def _ask(self, question: Lookup | Prefetch) -> Answer:
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._asked[question.id] = answer
        try:
            self._channel.send(question)
            if self.closed.done():
                answer.set_result(None)
            found = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and isinstance(late := answer.result(), Found):
                self.release(late.lease_id)
            self._channel.send(Cancel(question.id))
            raise
        finally:
            self._asked.pop(question.id, None)
        if found is None:
            raise PullError(PullReason.DISCONNECTED, format_address(self.source))
        return found

    def move(
        self,
        lease_id: str,
        mover: Mover,
        slots: tuple[int, ...],
        generations: tuple[int, ...],
        patience_s: float,
        window: int | None = None,
    ) -> MoveCall:
        """Ask to have `slots` written, or `window` of the mover's inbox; the answer is in the call's `ended`.

        Raises:
            PullError: DISCONNECTED; nothing was asked, so no slot is exposed.
        """
        if self.closed.done():
            raise PullError(PullReason.DISCONNECTED, format_address(self.source))
        self.mover_changed(mover)
        call = MoveCall(
            self._new_id(),
            secrets.token_hex(16),
            slots,
            self._loop.create_future(),
            self._loop.time(),
            window,
        )
        self._moves[call.id] = call
        patience_ms = max(0, int(patience_s * 1000))
        wanted, known = list(slots), list(generations)
        self._channel.send(Move(call.id, call.tag, lease_id, mover.epoch, wanted, known, patience_ms, window))
        return call

    def cancel(self, call: MoveCall) -> None:
        """Ask the source to stop writing; `ended` still tells when it has."""
        if not call.ended.done():
            self._channel.send(Cancel(call.id))

    def release(self, lease_id: str) -> None:
        """Give a lease back."""
        self._channel.send(Release(lease_id))

    async def close(self) -> None:
        """End the session; every call resolves with None."""
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _run(self) -> None:
        reason = "closed"
        try:
            while True:
                self._hear(await self._channel.from_server(self._limits.message_bytes))
        except ChannelClosed:
            pass
        except FrameError as exc:
            self._stats.bad_frames += 1
            reason = str(exc)
        finally:
            self._pinging.cancel()
            self._stats.sessions_out -= 1
            self._end()
            log.info("session to %s ended: %s", format_address(self.source), reason)
            await self._channel.close()

    def _end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        for call in self._moves.values():
            if not call.ended.done():
                call.ended.set_result(None)
        self._moves.clear()

    async def _ping(self) -> None:
        """Unanswered questions and not time tell silence: a loop of ours that was held up has not asked."""
        unanswered = 0
        while unanswered * self._limits.ping_s < self._limits.silence_s:
            self._channel.send(Ping())
            asked_s = self._loop.time()
            await asyncio.sleep(self._limits.ping_s)
            unanswered = 0 if self._channel.heard_at_s >= asked_s else unanswered + 1
        log.warning("%s has left %d questions unanswered", format_address(self.source), unanswered)
        self._channel.abort()

    def _hear(self, message: ServerMessage) -> None:
        match message:
            case Found() | Prefetched():
                self._answered(message)
            case Declined(id=request_id):
                if (call := self._moves.pop(request_id, None)) is not None:
                    call.ended.set_result(message)
                else:
                    self._answered(message)
            case Progress(id=request_id, chunks=chunks):
                if (call := self._moves.get(request_id)) is not None:
                    self._stats.chunks_reported += max(0, chunks - call.chunks)
                    call.chunks = chunks
                    call.heard_at_s = self._loop.time()
            case Ended(id=request_id):
                if (call := self._moves.pop(request_id, None)) is not None:
                    call.ended.set_result(message)
            case Pong():
                pass
            case _:
                raise FrameError(f"{type(message).__name__} after the handshake")

    def _answered(self, message: Answer) -> None:
        asked = self._asked.get(message.id)
        if asked is not None and not asked.done():
            asked.set_result(message)
        elif isinstance(message, Found):
            self.release(message.lease_id)  # nobody waits any more
