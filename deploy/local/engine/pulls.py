"""Fetching blocks from a peer into the own CPU tier, with a deadline, and never failing a request.

Whatever goes wrong is a reason in the request's report and fewer blocks. Slots that a peer may
still write into stay quarantined until the transport names them usable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.local.engine.events import EventLog
from deploy.local.engine.hashing import Block
from deploy.local.engine.kv_params import Address, Source
from deploy.local.engine.request import Request
from engine_plugin import wire
from engine_plugin.identity import format_address
from engine_plugin.pull_report import PullFinished
from engine_plugin.transport import Fetched, Offer, PullError
from epp.engine_model.cache import TierPool

log = logging.getLogger(__name__)

_SHORTEST_FETCH_S = 0.1


class Transport(Protocol):
    """The part of `PeerTransport` that pulls use."""

    address: Address

    async def lookup(
        self,
        source: Address,
        kv_request_id: str,
        hashes: Sequence[bytes],
        *,
        deadline_s: float,
        wait_s: float = 0.0,
    ) -> Offer: ...

    async def fetch(self, offer: Offer, slots: Sequence[int], *, deadline_s: float) -> Fetched: ...

    def abandon(self, offer: Offer) -> None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """What a pull from one source takes at least, as a step takes the model's time whatever the machine
    needs for its bytes."""

    floor_ms: float
    bytes_per_s: float

    def took_s(self, size_bytes: int) -> float:
        return self.floor_ms * 1e-3 + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How long a pull may take: `base_s` (wiring up a new pair included) plus the time that
    computing the blocks would take, at most `max_s`. A P/D decode leg waits for its prefill leg for the time
    the whole prompt takes plus `supply_wait_s` on top of that."""

    base_s: float = 2.0
    max_s: float = 10.0
    supply_wait_s: float = 10.0

    def deadline_s(self, recompute_s: float) -> float:
        return min(self.base_s + recompute_s, self.max_s)


class Puller:
    """Runs pulls; every method on the engine's loop."""

    def __init__(
        self,
        *,
        transport: Transport,
        pool: TierPool,
        events: EventLog,
        limits: PullLimits,
        block_size: int,
        on_change: Callable[[], None],
        on_finished: Callable[[PullFinished], None] = lambda _: None,
    ) -> None:
        """`on_finished` hears of every pull that a client's request named a source for."""
        self._transport = transport
        self._pool = pool
        self._events = events
        self._limits = limits
        self._block_size = block_size
        self._on_change = on_change  # events to publish, slots come free
        self._on_finished = on_finished
        self.paces: dict[str, Pace] = {}  # by `host:port` of the source; others take what they take
        self.ignored: Counter[str] = Counter()  # sources that were not even asked, by reason

    def refusal(self, request: Request, missing_blocks: int) -> str | None:
        """Why the named source will not be asked; None: it will be. Records it in the report."""
        transfer = request.spec.transfer
        if transfer.malformed is not None:
            reason, request.report.pull_detail = "malformed", transfer.malformed
        elif transfer.source is None:
            return None
        elif transfer.source.address == self._transport.address:
            reason = "self"
        elif missing_blocks == 0:
            reason = "local"
        else:
            return None
        self.ignored[reason] += 1
        request.report.pull_reason = reason
        if transfer.source is not None:
            self._tell(request, transfer.source)
        return reason

    async def pull(
        self, request: Request, source: Source, blocks: Sequence[Block], recompute_s: float
    ) -> tuple[int, ...]:
        """CPU slots, pinned for the caller, that now hold the leading ones of `blocks`; possibly
        none. If the client has left meanwhile, nothing stays pinned and nothing is returned."""
        report = request.report
        report.asked_blocks = len(blocks)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            slots = await self._lookup_and_fetch(request, source, blocks, recompute_s)
        except PullError as error:
            report.pull_reason, report.pull_detail = error.reason.value, error.detail
            slots = ()
        except Exception:  # a pull never makes a request fail, not even by a fault of our own
            log.exception("pull %s failed unexpectedly", source.kv_request_id)
            report.pull_reason = "internal"
            slots = ()
        pace = self.paces.get(format_address(source.address))
        if pace is not None and report.pulled_bytes:
            left_s = started_s + pace.took_s(report.pulled_bytes) - loop.time()
            await asyncio.sleep(max(0.0, left_s))
        report.pull_ms = (loop.time() - started_s) * 1e3
        self._tell(request, source)
        if request.gone.is_set() and slots:
            self._pool.unpin(slots)
            slots = ()
        self._on_change()
        return slots

    def _tell(self, request: Request, source: Source) -> None:
        """Report the end of a pull, whatever became of it. A P/D hand-over is none."""
        report = request.report
        if source.handed_over:
            return
        self._on_finished(
            PullFinished(
                id=source.kv_request_id,
                source=format_address(source.address),
                asked_tokens=report.asked_blocks * self._block_size,
                received_tokens=report.pulled_tokens,
                received_bytes=report.pulled_bytes,
                reason=report.pull_reason or "internal",
                ms=report.pull_ms or 0.0,
            )
        )

    async def _lookup_and_fetch(
        self, request: Request, source: Source, blocks: Sequence[Block], recompute_s: float
    ) -> tuple[int, ...]:
        wait_s = self._limits.supply_wait_s + recompute_s if source.supply_wait else 0.0
        deadline_s = self._limits.deadline_s(recompute_s)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        offer = await self._transport.lookup(
            source.address,
            source.kv_request_id,
            [block.name for block in blocks],
            deadline_s=deadline_s + wait_s,
            wait_s=wait_s,
        )
        wanted = min(offer.hit_blocks, len(blocks), self._pool.available)
        allocation = self._pool.allocate(wanted) if wanted else None
        if allocation is None or request.gone.is_set():
            if allocation is not None:
                self._events.removed(allocation.evicted, wire.MEDIUM_CPU)
                self._pool.unpin(allocation.slots)
            self._transport.abandon(offer)
            request.report.pull_reason = "aborted" if request.gone.is_set() else "no_slots"
            return ()
        self._events.removed(allocation.evicted, wire.MEDIUM_CPU)
        spent_s = 0.0 if source.supply_wait else loop.time() - started_s
        left_s = max(_SHORTEST_FETCH_S, deadline_s - spent_s)
        fetched = await self._fetch(offer, allocation.slots, left_s)
        return self._keep(request, source, blocks, allocation.slots, fetched)

    async def _fetch(self, offer: Offer, slots: tuple[int, ...], deadline_s: float) -> Fetched:
        """The transport's fetch; on any failure the slots are freed or quarantined."""
        try:
            return await self._transport.fetch(offer, slots, deadline_s=deadline_s)
        except PullError as error:
            held = set(error.quarantined)
            self._pool.quarantine([slot for slot in slots if slot in held])
            self._pool.unpin([slot for slot in slots if slot not in held])
            raise
        except BaseException:
            # cancelled (only when the engine ends) or a fault of our own: a write may be on its way
            self._pool.quarantine(slots)
            raise

    def _keep(
        self,
        request: Request,
        source: Source,
        blocks: Sequence[Block],
        slots: tuple[int, ...],
        fetched: Fetched,
    ) -> tuple[int, ...]:
        """Name the blocks that arrived, free the rest, count."""
        kept, rest = slots[: fetched.blocks], slots[fetched.blocks :]
        pairs = zip(blocks, kept, strict=False)
        self._events.cpu_stored([block for block, slot in pairs if self._pool.commit(slot, block.name)])
        self._pool.unpin(rest)
        report = request.report
        report.pull_reason = fetched.shortfall.value if fetched.shortfall else "ok"
        tokens = fetched.blocks * self._block_size
        if source.handed_over:
            report.handed_over_tokens, report.handed_over_bytes = tokens, fetched.received_bytes
        else:
            report.pulled_tokens, report.pulled_bytes = tokens, fetched.received_bytes
        return kept
