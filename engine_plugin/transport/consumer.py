"""A pull as its consumer sees it: look up, move, verify. Every wait is bounded, every slot accounted for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_plugin.identity import Address, PeerIdentity, format_address
from engine_plugin.protocol import Declined, Ended, Found
from engine_plugin.transport.checksums import Checksums
from engine_plugin.transport.control.dialer import Dialer
from engine_plugin.transport.control.outbound import MoveCall, OutboundSession
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.supervisor import MoverSupervisor
from engine_plugin.transport.quarantine import Quarantine, settled
from engine_plugin.transport.stats import PULL_OK, TransportStats
from engine_plugin.transport.types import Fetched, Offer, PrefetchOrder, PrefetchResult, PullError, PullReason

QUEUE_SHARE: Final = 0.6  # of the time left that a request may wait for its turn at the source
MAX_OFFERS: Final = 4096  # unfetched offers that are remembered; the oldest is given back beyond it

_DECLINED: Final = {
    "miss": PullReason.MISS,
    "limit": PullReason.REFUSED_LIMIT,
    "stale": PullReason.STALE,
    "mover_down": PullReason.MOVER_DOWN,
    "timeout": PullReason.TIMEOUT,
    "failed": PullReason.PROTOCOL,
    "unsupported": PullReason.PROTOCOL,
}


@dataclass(frozen=True, slots=True)
class _OpenOffer:
    session: OutboundSession
    lease_id: str


class Consumer:
    """Look-ups and fetches of one transport."""

    def __init__(
        self,
        *,
        identity: PeerIdentity,
        slots: int,
        checksums: Checksums,
        dialer: Dialer,
        movers: MoverSupervisor,
        quarantine: Quarantine,
        usable: Callable[[Sequence[int]], None],
        limits: Limits,
        stats: TransportStats,
    ) -> None:
        self._identity = identity
        self._slots = slots
        self._checksums = checksums
        self._dialer = dialer
        self._movers = movers
        self._quarantine = quarantine
        self._usable = usable
        self._limits = limits
        self._stats = stats
        self._offers: dict[str, _OpenOffer] = {}
        self._ids = itertools.count(1)

    async def connect(self, source: Address, deadline_s: float) -> None:
        """See `PeerTransport.connect`."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._dialer.session(source)
        except TimeoutError as exc:
            raise PullError(PullReason.TIMEOUT, format_address(source)) from exc

    async def prefetch(self, target: Address, order: PrefetchOrder) -> PrefetchResult:
        """See `PeerTransport.prefetch`."""
        try:
            async with asyncio.timeout(order.deadline_s):
                session = await self._dialer.session(target)
                ended = await session.prefetch(order)
        except TimeoutError as exc:
            raise PullError(PullReason.TIMEOUT, format_address(target)) from exc
        if isinstance(ended, Declined):
            raise PullError(_DECLINED[ended.reason], ended.detail)
        return PrefetchResult(ended.blocks, ended.bytes, ended.reason)

    # --- look-up -------------------------------------------------------------------------------

    async def lookup(
        self, source: Address, kv_request_id: str, hashes: Sequence[bytes], deadline_s: float, wait_s: float
    ) -> Offer:
        """See `PeerTransport.lookup`."""
        try:
            return await self._lookup(source, kv_request_id, hashes, deadline_s, wait_s)
        except PullError as exc:
            self._stats.pulls[exc.reason.value] += 1
            if wait_s == 0:  # a supply that did not come in time says nothing about the peer
                self._dialer.failed(source, exc)
            raise

    async def _lookup(
        self, source: Address, kv_request_id: str, hashes: Sequence[bytes], deadline_s: float, wait_s: float
    ) -> Offer:
        hashes = hashes[: self._limits.hashes_per_lookup]
        self._stats.asked_blocks += len(hashes)
        until_s = self._now() + deadline_s
        try:
            async with asyncio.timeout_at(until_s):
                session = await self._dialer.session(source)
                patience_s = QUEUE_SHARE * (until_s - self._now() - wait_s)
                found = await session.lookup(kv_request_id, hashes, wait_s=wait_s, patience_s=patience_s)
        except TimeoutError as exc:
            detail = f"{format_address(source)} did not answer within {deadline_s:.2f} s"
            raise PullError(PullReason.TIMEOUT, detail) from exc
        if isinstance(found, Declined):
            self._count_limit(found, session)
            raise PullError(_DECLINED[found.reason], found.detail)
        blocks = len(found.generations)
        checkable = len(found.checksums) == blocks or not self._checksums.enabled
        if not (0 < blocks <= len(hashes) and checkable):
            session.release(found.lease_id)
            raise PullError(PullReason.PROTOCOL, f"{format_address(source)} offers what was not asked")
        self._stats.offered_blocks += blocks
        return self._open(session, source, kv_request_id, found)

    def _open(self, session: OutboundSession, source: Address, kv_request_id: str, found: Found) -> Offer:
        offer_id = f"{session.peer}/{next(self._ids)}"
        self._offers[offer_id] = _OpenOffer(session, found.lease_id)
        if len(self._offers) > MAX_OFFERS:
            self._give_back(next(iter(self._offers)))
        return Offer(
            offer_id=offer_id,
            source=source,
            peer=session.peer,
            kv_request_id=kv_request_id,
            hit_blocks=len(found.generations),
            generations=tuple(found.generations),
            checksums=tuple(found.checksums),
            expires_at_s=asyncio.get_running_loop().time() + found.lease_ms / 1000,
        )

    def abandon(self, offer: Offer) -> None:
        """See `PeerTransport.abandon`."""
        self._give_back(offer.offer_id)

    def _give_back(self, offer_id: str) -> None:
        opened = self._offers.pop(offer_id, None)
        if opened is not None:
            opened.session.release(opened.lease_id)

    # --- fetch ---------------------------------------------------------------------------------

    async def fetch(self, offer: Offer, slots: Sequence[int], deadline_s: float) -> Fetched:
        """See `PeerTransport.fetch`."""
        wanted = tuple(slots)
        self._check_slots(offer, wanted)
        try:
            fetched = await self._fetch(offer, wanted, deadline_s)
        except PullError as exc:
            self._stats.pulls[exc.reason.value] += 1
            self._dialer.failed(offer.source, exc)
            raise
        self._dialer.worked(offer.source)
        self._stats.transfer_s.add(fetched.ms / 1000)
        self._stats.pulls[fetched.shortfall.value if fetched.shortfall else PULL_OK] += 1
        return fetched

    def _check_slots(self, offer: Offer, slots: tuple[int, ...]) -> None:
        if not 0 < len(slots) <= offer.hit_blocks:
            raise ValueError(f"{len(slots)} slots for an offer of {offer.hit_blocks} blocks")
        if len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= self._slots:
            raise ValueError(f"slots must be distinct and within {self._slots}")

    async def _fetch(self, offer: Offer, slots: tuple[int, ...], deadline_s: float) -> Fetched:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        until_s = started_s + deadline_s
        opened = self._offers.pop(offer.offer_id, None)
        if opened is None:
            raise PullError(PullReason.STALE, "the offer was used or given back before")
        mover = await self._mover(opened, slots, until_s)
        generations = offer.generations[: len(slots)]
        patience_s = QUEUE_SHARE * min(until_s - loop.time(), self._limits.first_progress_s)
        window = mover.windows.take(len(slots) * self._identity.block_bytes)
        try:
            call = opened.session.move(opened.lease_id, mover, slots, generations, patience_s, window)
        except PullError:
            _give_window(mover, window)
            raise
        arrived = mover.expect(call.tag)
        self._stats.moves_in += 1
        try:
            failure = await self._watch(call, arrived, mover, until_s)
        except asyncio.CancelledError:
            self._give_up(opened.session, call, mover, tell=True)
            raise
        finally:
            self._stats.moves_in -= 1
        if failure is not None:
            held = self._give_up(opened.session, call, mover, tell=False)
            raise PullError(failure.reason, failure.detail, held)
        mover.unexpect(call.tag)
        await self._unpack(call, mover, until_s)
        return await self._verify(offer, slots, started_s)

    async def _unpack(self, call: MoveCall, mover: Mover, until_s: float) -> None:
        """A packed move's blocks from the window into their slots; the window is free afterwards.

        Until our mover has done it, or is dead, the slots are being written: whoever gives up before leaves
        them in quarantine.
        """
        ended = call.ended.result()
        if call.window is None or not (isinstance(ended, Ended) and ended.packed):
            _give_window(mover, call.window)
            return
        self._stats.packed_moves += 1
        done = mover.scatter(call.tag, call.window, call.slots)
        done.add_done_callback(lambda _: _give_window(mover, call.window))
        left_s = max(0.0, until_s - self._now())
        try:
            await asyncio.wait({done}, timeout=left_s)
        except asyncio.CancelledError:
            done.add_done_callback(lambda _: self._usable(call.slots))
            raise
        if not done.done():
            self._stats.quarantined_slots += len(call.slots)
            done.add_done_callback(lambda _: self._free_unpacked(call))
            raise PullError(PullReason.TIMEOUT, "our own mover does not unpack", call.slots)
        if done.cancelled():
            raise PullError(PullReason.MOVER_DOWN, "our own mover ended")

    def _free_unpacked(self, call: MoveCall) -> None:
        self._stats.quarantined_slots -= len(call.slots)
        self._usable(call.slots)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _mover(self, opened: _OpenOffer, slots: tuple[int, ...], until_s: float) -> Mover:
        """Our mover, once one is up. Nothing can be written yet, so the slots are free if this fails."""
        try:
            async with asyncio.timeout_at(min(until_s, self._now() + self._limits.own_mover_s)):
                return await self._movers.acquire()
        except TimeoutError:
            opened.session.release(opened.lease_id)
            raise PullError(PullReason.MOVER_DOWN, "our own mover is down") from None
        except asyncio.CancelledError:
            opened.session.release(opened.lease_id)
            asyncio.get_running_loop().call_soon(self._usable, slots)
            raise

    async def _watch(
        self, call: MoveCall, arrived: asyncio.Future[None], mover: Mover, until_s: float
    ) -> PullError | None:
        """Wait for the end of a move and for its notification; None if it is all there.

        Cases: ended, our mover died, no progress for too long, deadline.
        """
        loop = asyncio.get_running_loop()
        ends: set[asyncio.Future[Any]] = {call.ended, mover.gone}
        while not call.ended.done():
            if mover.gone.done():
                return PullError(PullReason.MOVER_DOWN, "our own mover ended")
            patience_s = self._limits.progress_s if call.chunks else self._limits.first_progress_s
            left_s = min(until_s, call.heard_at_s + patience_s) - loop.time()
            if left_s <= 0:
                return PullError(PullReason.TIMEOUT, f"after {call.chunks} chunks")
            # never longer than progress_s: the patience shrinks with the first chunk
            left_s = min(left_s, self._limits.progress_s)
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        failure = self._failure(call, call.ended.result())
        if failure is None and not arrived.done():
            grace_s = max(0.0, min(until_s - loop.time(), self._limits.notification_s))
            either: set[asyncio.Future[Any]] = {arrived, mover.gone}
            await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if failure is None and mover.gone.done():
            return PullError(PullReason.MOVER_DOWN, "our own mover ended")
        if failure is None and not arrived.done():
            # every chunk has resolved at the source, so nothing more can land; what landed is verified next
            self._stats.notifications_missed += 1
        return failure

    def _failure(self, call: MoveCall, outcome: Ended | Declined | None) -> PullError | None:
        match outcome:
            case None:
                return PullError(PullReason.DISCONNECTED, f"after {call.chunks} chunks")
            case Declined(reason=reason, detail=detail):
                return PullError(_DECLINED[reason], detail)
            case Ended(reason="done", bytes=size) if size == len(call.slots) * self._identity.block_bytes:
                return None
            case Ended(reason="done", bytes=size):
                return PullError(PullReason.PROTOCOL, f"{size} bytes for {len(call.slots)} blocks")
            case Ended(reason="mover_down", detail=detail):
                return PullError(PullReason.MOVER_DOWN, f"the source's mover: {detail}")
            case Ended(reason="cancelled"):
                return PullError(PullReason.TIMEOUT, "the lease ran out during the move")
            case Ended(detail=detail):
                return PullError(PullReason.DISCONNECTED, detail)

    def _give_up(
        self, session: OutboundSession, call: MoveCall, mover: Mover, *, tell: bool
    ) -> tuple[int, ...]:
        """Stop a move; returns the slots that stay in quarantine.

        `tell`: the caller is gone and cannot be returned anything, so even slots that are free at once
        are named through `slots_usable`.
        """
        session.cancel(call)
        if mover.gone.done() or (call.ended.done() and settled(call.ended.result())):
            mover.unexpect(call.tag)
            _give_window(mover, call.window)
            if tell:
                asyncio.get_running_loop().call_soon(self._usable, call.slots)
            return ()
        self._quarantine.hold(call, mover)
        return call.slots

    async def _verify(self, offer: Offer, slots: tuple[int, ...], started_s: float) -> Fetched:
        loop = asyncio.get_running_loop()
        try:
            blocks = await self._checksums.verified_prefix(slots, offer.checksums)
        except asyncio.CancelledError:
            loop.call_soon(self._usable, slots)
            raise
        if blocks == 0:
            raise PullError(PullReason.CHECKSUM, "the first block differs from what was announced")
        received_bytes = blocks * self._identity.block_bytes
        self._stats.received_bytes[self._stats.peer_label(offer.peer)] += received_bytes
        self._stats.received_blocks += blocks
        shortfall = PullReason.CHECKSUM if blocks < len(slots) else None
        return Fetched(blocks, received_bytes, (loop.time() - started_s) * 1000, shortfall)

    def _count_limit(self, declined: Declined, session: OutboundSession) -> None:
        if declined.reason == "limit":
            self._stats.count_refusal(session.peer, "limit")


def _give_window(mover: Mover, window: int | None) -> None:
    if window is not None:
        mover.windows.give(window)
