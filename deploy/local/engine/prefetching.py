"""Pulling by order, with no request attached: blocks of a prompt come from a peer into the own CPU tier.

The transport authenticates and rates orders; here they are named, fetched and announced. Whatever goes
wrong is a reason and fewer blocks. It never touches the device tier and never makes anybody wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploy.local.engine.events import EventLog
from deploy.local.engine.hashing import Block, BlockHasher
from deploy.local.engine.pulls import Transport
from engine_plugin import wire
from engine_plugin.transport import PrefetchOrder, PrefetchResult, PullError
from epp.engine_model.cache import TierPool


class BlockPrefetcher:
    """The engine's `Prefetcher`. `transport` is set once it exists: each needs the other."""

    def __init__(
        self, *, pool: TierPool, events: EventLog, hasher: BlockHasher, on_change: Callable[[], None]
    ) -> None:
        self.transport: Transport | None = None
        self._pool, self._events, self._hasher = pool, events, hasher
        self._on_change = on_change

    async def __call__(self, order: PrefetchOrder) -> PrefetchResult:
        """Blocks that are here already are not pulled again."""
        chain: list[Block] = []
        self._hasher.extend(
            chain, order.tokens, salt=order.cache_salt or None, lora_name=order.lora_name or None
        )
        if self.transport is None or not chain:
            return PrefetchResult(0, 0, "protocol")  # events of a block need its tokens
        held = self._pool.prefix([block.name for block in chain])
        self._pool.pin(held)
        try:
            blocks, size, reason = await self._fetch(order, chain[len(held) :])
        finally:
            self._pool.unpin(held)
            self._on_change()
        return PrefetchResult(len(held) + blocks, size, reason)

    async def _fetch(self, order: PrefetchOrder, missing: Sequence[Block]) -> tuple[int, int, str]:
        """(blocks, bytes, reason)."""
        assert self.transport is not None
        if not missing:
            return 0, 0, "ok"
        names = [block.name for block in missing]
        try:
            offer = await self.transport.lookup(
                order.source, order.kv_request_id, names, deadline_s=order.deadline_s
            )
        except PullError as error:
            return 0, 0, error.reason.value
        allocation = self._pool.allocate(min(offer.hit_blocks, len(missing)))
        if allocation is None:
            self.transport.abandon(offer)
            return 0, 0, "no_slots"
        self._events.removed(allocation.evicted, wire.MEDIUM_CPU)
        slots = allocation.slots
        try:
            fetched = await self.transport.fetch(offer, slots, deadline_s=order.deadline_s)
        except PullError as error:
            held = set(error.quarantined)
            self._pool.quarantine([slot for slot in slots if slot in held])
            self._pool.unpin([slot for slot in slots if slot not in held])
            return 0, 0, error.reason.value
        except BaseException:  # a write may be on its way
            self._pool.quarantine(slots)
            raise
        pairs = list(zip(missing, slots[: fetched.blocks], strict=False))
        self._events.cpu_stored([block for block, slot in pairs if self._pool.commit(slot, block.name)])
        self._pool.unpin(slots)
        return fetched.blocks, fetched.received_bytes, fetched.shortfall.value if fetched.shortfall else "ok"
