"""What one authenticated, compatible peer may ask of us: look-ups and moves, within its limits.

A request that finds no room waits for its turn, no longer than the peer would; one that never can have it is
answered at once. An accepted one is answered in any case, with data, a refusal or an end. Nothing here reads
the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from engine_plugin.identity import PeerIdentity
from engine_plugin.protocol import Declined, Found, FrameError, Lookup, Move, MoverInfo, Prefetch
from engine_plugin.transport.control.leases import GrantedLease, PeerBudget
from engine_plugin.transport.control.moving import ServedMove
from engine_plugin.transport.control.producer import Producer
from engine_plugin.transport.control.turns import NoRoom, Ticket
from engine_plugin.transport.mover.link import Mover

MAX_ADDRESS: Final = 1 << 63
ANSWER_S: Final = 5.0  # a look-up beyond its announced wait
_LEASE_LIMITS: Final = {"count": "leases", "size": "leased_bytes", "waiting": "lookups_waiting"}
_MOVE_LIMITS: Final = {"count": "moves_in_flight", "size": "bytes_in_flight", "waiting": "moves_waiting"}

log = logging.getLogger(__name__)


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
        self._moves: dict[int, ServedMove] = {}
        self._info: MoverInfo | None = None
        self._wired: tuple[Mover, str] | None = None

    # --- the peer's mover ------------------------------------------------------------------------

    def mover_info(self, info: MoverInfo) -> None:
        """The peer's mover, or its replacement. Raises FrameError on one that cannot be the peer's."""
        if not info.agent.startswith(f"{self._peer.instance}-{self._peer.rank}#"):
            raise FrameError("the mover's name is not of the peer's instance")
        tier_end = info.base_address + info.slots * self._peer.block_bytes
        if max(tier_end, info.inbox_address + info.inbox_bytes) > MAX_ADDRESS:
            raise FrameError("the mover's memory does not fit the address space")
        if not self._budget.movers.take(1, asyncio.get_running_loop().time()):
            raise FrameError("new movers all the time")  # each costs our own mover some 10 ms
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
        try:
            ticket = self._lookup_turn(request)
        except NoRoom as exc:
            self._refuse_limit(request.id, _LEASE_LIMITS.get(exc.what, exc.what))
            return
        self._producer.stats.lookups += 1
        task = self._producer.run(self._lookup(request, ticket), "p2p-lookup")
        self._lookups[request.id] = task

        def done(_: asyncio.Task[None]) -> None:  # not `finally`: a task cancelled early never runs
            self._lookups.pop(request.id, None)
            if ticket not in self._budget.leased:
                self._producer.leasing.leave(ticket)

        task.add_done_callback(done)

    def _lookup_turn(self, request: Lookup) -> Ticket:
        """Room for everything that is asked; for a supply that is waited for only a place, as its blocks are
        pinned by who announced it. Raises NoRoom."""
        if len(request.hashes) > self._producer.limits.hashes_per_lookup:
            raise NoRoom("hashes_per_lookup")
        blocks = 0 if request.wait_ms else min(len(request.hashes), self._most_blocks())
        return self._producer.leasing.request(self._budget.host, blocks * self._peer.block_bytes)

    def _most_blocks(self) -> int:
        """What one lease may pin, at least one block."""
        return max(1, self._producer.leasing.largest() // self._peer.block_bytes)

    async def _lookup(self, request: Lookup, ticket: Ticket) -> None:
        limits = self._producer.limits
        try:
            patience_s = min(request.patience_ms / 1000, limits.queue_s)
            if not await self._producer.leasing.wait(ticket, patience_s):
                self._refuse_limit(request.id, "leases")
                return
            if self._producer.faults is not None and self._producer.faults.stall_lookup:
                await self._producer.faults.proceed.wait()
            self._send(await self._find(request, ticket))
        except TimeoutError:
            self._send(Declined(request.id, "timeout", "the store did not answer"))
        except Exception:
            log.exception("look-up %s of peer %s", request.kv_request_id, self._label)
            self._send(Declined(request.id, "failed", "the producer's own fault"))

    async def _find(self, request: Lookup, ticket: Ticket) -> Found | Declined:
        producer = self._producer
        wait_s = min(request.wait_ms / 1000, producer.limits.lookup_wait_s)
        hashes = request.hashes[: self._most_blocks()]
        async with asyncio.timeout(wait_s + ANSWER_S):
            lease = await producer.store.lease(hashes, request.kv_request_id, wait_s)
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
        producer.leasing.resize(ticket, len(lease.slots) * self._peer.block_bytes)
        granted = producer.leases.grant(lease, self, self._leased_until_released(ticket))
        lease_ms = int(producer.limits.lease_s * 1000)
        return Found(request.id, granted.token, list(lease.generations), digests, lease_ms)

    def _leased_until_released(self, ticket: Ticket) -> Callable[[], None]:
        self._budget.leased.add(ticket)

        def released() -> None:
            self._budget.leased.discard(ticket)
            self._producer.leasing.leave(ticket)

        return released

    # --- moves -----------------------------------------------------------------------------------

    def move(self, request: Move) -> None:
        """Start writing when its turn comes, or refuse at once; an accepted move is answered."""
        self._check_new(request.id)
        granted = self._producer.leases.find(request.lease_id, self)
        if granted is None:
            self._send(Declined(request.id, "stale", "no such lease of this session"))
            return
        if (refused := self._refusal(request, granted)) is not None:
            self._send(refused)
        else:
            try:
                moving_bytes = len(request.slots) * self._peer.block_bytes
                self._begin(request, granted, self._producer.moves.request(self._budget.host, moving_bytes))
                return
            except NoRoom as exc:
                self._refuse_limit(request.id, _MOVE_LIMITS[exc.what])
        self._producer.leases.release(granted.token)

    def _begin(self, request: Move, granted: GrantedLease, ticket: Ticket) -> None:
        def start() -> tuple[Mover, MoverInfo] | Declined:
            mover, info = self._producer.movers.current, self._info
            if (refused := self._refusal(request, granted)) is not None or mover is None or info is None:
                return refused or Declined(request.id, "mover_down", "the producer's mover is down")
            self.wire(mover)
            return mover, info

        move = ServedMove(
            self._producer,
            request,
            granted,
            ticket,
            peer_label=self._label,
            start=start,
            send=self._send,
        )
        self._producer.leases.use(granted, move.cancel)
        self._moves[request.id] = move
        task = self._producer.run(move.run(), "p2p-move")

        def done(_: asyncio.Task[None]) -> None:
            self._moves.pop(request.id, None)
            self._producer.leases.release(granted.token)

        task.add_done_callback(done)

    def _refusal(self, request: Move, granted: GrantedLease) -> Declined | None:
        """Why it cannot start now."""
        if (stale := self._stale(request, granted)) is not None:
            return Declined(request.id, "stale", stale)
        mover = self._producer.movers.current
        if mover is None or self._info is None or mover.writing(request.tag):
            return Declined(request.id, "mover_down", "the producer's mover is down")
        return None

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

    # --- prefetch --------------------------------------------------------------------------------

    def prefetch(self, order: Prefetch) -> None:
        """Pull for the peer, or refuse at once. Only its own deadline ends it, not even the session."""
        refused = self._producer.prefetching.refusal(order)
        if refused is None:
            self._producer.run(self._prefetch(order), "p2p-prefetch")
            return
        if refused.reason == "limit":
            self._producer.stats.count_refusal(self._peer.instance, "limit")
        self._send(refused)

    async def _prefetch(self, order: Prefetch) -> None:
        self._send(await self._producer.prefetching.run(order))

    # --- the rest --------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Give up a look-up (silently) or a move (which still answers)."""
        if (task := self._lookups.get(request_id)) is not None:
            task.cancel()
        elif (move := self._moves.get(request_id)) is not None:
            move.cancel()

    def release(self, token: str) -> None:
        """The peer gives a lease back."""
        if self._producer.leases.find(token, self) is not None:
            self._producer.leases.release(token)

    def end(self) -> None:
        """The session is over: nothing of it stays pinned longer than a running transfer needs."""
        for task in list(self._lookups.values()):
            task.cancel()
        for move in list(self._moves.values()):
            move.cancel()
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
