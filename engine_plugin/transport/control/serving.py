"""What one authenticated, compatible peer may ask of us: look-ups and moves, within its limits.

A request beyond a limit is answered at once; an accepted one is answered in any case, with data, a
refusal or an end. Nothing here reads the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

import msgspec

from engine_plugin.identity import PeerIdentity
from engine_plugin.protocol import Declined, Ended, Found, FrameError, Lookup, Move, MoverInfo, Progress
from engine_plugin.transport.checksums import Checksums
from engine_plugin.transport.control.leases import GrantedLease, LeaseBook, PeerBudget
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.messages import StartMove
from engine_plugin.transport.mover.supervisor import MoverSupervisor
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import BlockStore

MAX_ADDRESS: Final = 1 << 63
ANSWER_S: Final = 5.0  # a look-up beyond its announced wait

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Producer:
    """What all sessions of this producer share."""

    identity: PeerIdentity
    store: BlockStore
    checksums: Checksums
    movers: MoverSupervisor
    leases: LeaseBook
    limits: Limits
    stats: TransportStats
    faults: Faults | None
    tasks: set[asyncio.Task[None]]

    def run(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A request as a task that `stop` waits for."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Serving:
    """Requests of one session; answers go to `send`."""

    def __init__(
        self,
        producer: Producer,
        peer: PeerIdentity,
        budget: PeerBudget,
        send: Callable[[msgspec.Struct], None],
    ) -> None:
        self._producer = producer
        self._peer = peer
        self._label = producer.stats.peer_label(peer.instance)
        self._budget = budget
        self._send = send
        self._lookups: dict[int, asyncio.Task[None]] = {}
        self._moves: dict[int, Callable[[], None]] = {}  # id -> cancel
        self._info: MoverInfo | None = None
        self._wired: tuple[Mover, str] | None = None

    # --- the peer's mover ------------------------------------------------------------------------

    def mover_info(self, info: MoverInfo) -> None:
        """The peer's mover, or its replacement. Raises FrameError on one that cannot be the peer's."""
        if not info.agent.startswith(f"{self._peer.instance}-{self._peer.rank}#"):
            raise FrameError("the mover's name is not of the peer's instance")
        if info.base_address + info.slots * self._peer.block_bytes > MAX_ADDRESS:
            raise FrameError("the mover's memory does not fit the address space")
        self._producer.stats.mover_infos += 1
        self._info = info
        self.wire(self._producer.movers.current)

    def wire(self, mover: Mover | None) -> None:
        """Make our mover know the peer's; called again whenever either is replaced."""
        wired = self._wired
        if self._info is None or mover is None or wired == (mover, self._info.agent):
            return
        if wired is not None:
            wired[0].drop_peer(wired[1])
        mover.add_peer(self._info.agent, self._info.metadata)
        self._wired = (mover, self._info.agent)

    # --- look-ups ------------------------------------------------------------------------------

    def lookup(self, request: Lookup) -> None:
        """Start answering, or refuse at once."""
        self._check_new(request.id)
        limit = self._lookup_limit(request)
        if limit is not None:
            self._refuse_limit(request.id, limit)
            return
        self._budget.lookups += 1
        self._producer.stats.lookups += 1
        task = self._producer.run(self._lookup(request), "p2p-lookup")
        self._lookups[request.id] = task

        def done(_: asyncio.Task[None]) -> None:  # not `finally`: a task cancelled early never runs
            self._budget.lookups -= 1
            self._lookups.pop(request.id, None)

        task.add_done_callback(done)

    def _lookup_limit(self, request: Lookup) -> str | None:
        limits, budget = self._producer.limits, self._budget
        if len(request.hashes) > limits.hashes_per_lookup:
            return "hashes_per_lookup"
        if budget.lookups >= limits.lookups_outstanding:
            return "lookups_outstanding"
        return "leases" if budget.leases + budget.lookups >= limits.leases else None

    async def _lookup(self, request: Lookup) -> None:
        try:
            if self._producer.faults is not None and self._producer.faults.stall_lookup:
                await self._producer.faults.proceed.wait()
            self._send(await self._find(request))
        except TimeoutError:
            self._send(Declined(request.id, "timeout", "the store did not answer"))
        except Exception:
            log.exception("look-up %s of peer %s", request.kv_request_id, self._label)
            self._send(Declined(request.id, "failed", "the producer's own fault"))

    async def _find(self, request: Lookup) -> Found | Declined:
        producer = self._producer
        wait_s = min(request.wait_ms / 1000, producer.limits.lookup_wait_s)
        async with asyncio.timeout(wait_s + ANSWER_S):
            lease = await producer.store.lease(request.hashes, request.kv_request_id, wait_s)
        if lease is None or not lease.slots:
            return Declined(request.id, "miss")
        try:
            digests = await producer.checksums.leased(lease.slots, lease.generations)
        except BaseException:
            producer.store.release(lease.lease_id)
            raise
        faults = producer.faults
        if faults is not None and faults.corrupt_block is not None and faults.corrupt_block < len(digests):
            digests[faults.corrupt_block] ^= 1
        granted = producer.leases.grant(lease, self, self._budget)
        lease_ms = int(producer.limits.lease_s * 1000)
        return Found(request.id, granted.token, list(lease.generations), digests, lease_ms)

    # --- moves -----------------------------------------------------------------------------------

    def move(self, request: Move) -> None:
        """Start writing, or refuse at once; an accepted move is answered with `Ended`."""
        self._check_new(request.id)
        granted = self._producer.leases.find(request.lease_id, self)
        mover = self._producer.movers.current
        if granted is None:
            self._send(Declined(request.id, "stale", "no such lease of this session"))
            return
        limit = self._move_limit(len(request.slots))
        if limit is not None:
            self._refuse_limit(request.id, limit)
        elif (stale := self._stale(request, granted)) is not None:
            self._send(Declined(request.id, "stale", stale))
        elif mover is None or self._info is None or mover.writing(request.tag):
            self._send(Declined(request.id, "mover_down", "the producer's mover is down"))
        else:
            self._start(request, granted, mover, self._info)
            return
        self._producer.leases.release(granted.token)

    def _move_limit(self, blocks: int) -> str | None:
        limits, budget = self._producer.limits, self._budget
        if budget.moves >= limits.moves_in_flight:
            return "moves_in_flight"
        moving_bytes = budget.moving_bytes + blocks * self._peer.block_bytes
        return "bytes_in_flight" if moving_bytes > limits.bytes_in_flight else None

    def _stale(self, request: Move, granted: GrantedLease) -> str | None:
        lease = granted.lease
        count = len(request.slots)
        if not 0 < count <= len(lease.slots):
            return f"{count} blocks of a lease over {len(lease.slots)}"
        if tuple(request.generations) != lease.generations[:count]:
            return "generations differ from the lease"
        if lease.still_valid is not None and not lease.still_valid():
            return "blocks changed under the lease"
        if self._info is None or request.epoch != self._info.epoch:
            return "the consumer's mover was replaced"
        if max(request.slots) >= self._info.slots:
            return f"target slot out of {self._info.slots}"
        return None

    def _start(self, request: Move, granted: GrantedLease, mover: Mover, info: MoverInfo) -> None:
        self.wire(mover)

        cancelled = asyncio.Event()

        def cancel() -> None:
            cancelled.set()
            mover.cancel(request.tag)

        self._producer.leases.use(granted, cancel)
        self._moves[request.id] = cancel
        self._budget.moves += 1
        self._budget.moving_bytes += len(request.slots) * self._peer.block_bytes
        self._producer.run(self._move(request, granted, mover, info, cancelled), "p2p-move")

    async def _move(
        self,
        request: Move,
        granted: GrantedLease,
        mover: Mover,
        info: MoverInfo,
        cancelled: asyncio.Event,
    ) -> None:
        producer, stats = self._producer, self._producer.stats
        faults = producer.faults
        order = StartMove(
            tag=request.tag,
            agent=info.agent,
            source_slots=list(granted.lease.slots[: len(request.slots)]),
            target_slots=request.slots,
            target_base=info.base_address,
            chunk_bytes=producer.limits.chunk_bytes,
            chunks_in_flight=producer.limits.chunks_in_flight,
            hold_after_chunks=faults.hold_after_chunks if faults is not None else None,
        )
        written = 0

        def on_chunks(chunks: int) -> None:
            nonlocal written
            stats.chunks_written += chunks - written
            written = chunks
            self._send(Progress(request.id, chunks))

        stats.moves_out += 1
        hold = producer.run(_hold(faults, mover, request.tag), "p2p-hold") if faults is not None else None
        try:
            if faults is not None and faults.throttle_bytes_per_s:
                with contextlib.suppress(TimeoutError):
                    moving_bytes = len(request.slots) * self._peer.block_bytes
                    await asyncio.wait_for(cancelled.wait(), moving_bytes / faults.throttle_bytes_per_s)
                    self._send(Ended(request.id, "cancelled", True, 0, ""))
                    return
            ended = await mover.write(order, on_chunks, faults.holding.set if faults is not None else _ignore)
            stats.served_bytes[self._label] += ended.written_bytes
            stats.served_blocks += ended.written_bytes // self._peer.block_bytes
            reason = "mover_down" if mover.gone.done() and ended.reason == "failed" else ended.reason
            self._send(Ended(request.id, reason, ended.settled, ended.written_bytes, ended.detail[:256]))
        finally:
            stats.moves_out -= 1
            self._budget.moves -= 1
            self._budget.moving_bytes -= len(request.slots) * self._peer.block_bytes
            self._moves.pop(request.id, None)
            producer.leases.release(granted.token)
            if hold is not None:
                hold.cancel()

    # --- the rest --------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Give up a look-up (silently) or a move (which still answers)."""
        if (task := self._lookups.get(request_id)) is not None:
            task.cancel()
        elif (cancel := self._moves.get(request_id)) is not None:
            cancel()

    def release(self, token: str) -> None:
        """The peer gives a lease back."""
        if self._producer.leases.find(token, self) is not None:
            self._producer.leases.release(token)

    def end(self) -> None:
        """The session is over: nothing of it stays pinned longer than a running transfer needs."""
        for task in list(self._lookups.values()):
            task.cancel()
        for cancel in list(self._moves.values()):
            cancel()
        self._producer.leases.release_unused(self)
        if self._wired is not None:
            self._wired[0].drop_peer(self._wired[1])
            self._wired = None

    def _check_new(self, request_id: int) -> None:
        if request_id in self._lookups or request_id in self._moves:
            raise FrameError(f"request id {request_id} is in use")

    def _refuse_limit(self, request_id: int, limit: str) -> None:
        self._producer.stats.count_refusal(self._peer.instance, "limit")
        self._send(Declined(request_id, "limit", limit))


def _ignore() -> None:
    """No fault is injected."""


async def _hold(faults: Faults, mover: Mover, tag: str) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await faults.proceed.wait()
        mover.proceed(tag)
