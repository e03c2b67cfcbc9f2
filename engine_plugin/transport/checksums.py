"""xxh3-64 of blocks in our own tier, computed off the loop; a cache by slot and generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

import xxhash

from engine_plugin.transport.tier_memory import TierMemory

INLINE_BYTES: Final = 256 << 10  # a thread switch costs more than hashing this much


class Checksums:
    """Digests of one tier's slots.

    The cache trusts generations: a slot whose content changed must have a new one. `enabled` False: none are
    announced, and none are expected; generations alone then guard against stale blocks.
    """

    def __init__(self, tier: TierMemory, threads: Executor, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._tier = tier
        self._threads = threads
        self._known: dict[int, tuple[int, int]] = {}  # slot -> (generation, digest); at most one per slot

    async def leased(self, slots: Sequence[int], generations: Sequence[int]) -> list[int]:
        """Digests of pinned slots; none when disabled."""
        if not self.enabled:
            return []
        missing = [
            at for at, slot in enumerate(slots) if self._known.get(slot, (None, 0))[0] != generations[at]
        ]
        digests = await self.fresh([slots[at] for at in missing])
        for at, digest in zip(missing, digests, strict=True):
            self._known[slots[at]] = (generations[at], digest)
        return [self._known[slot][1] for slot in slots]

    async def fresh(self, slots: Sequence[int]) -> list[int]:
        """Digests of what is in these slots now."""
        if len(slots) * self._tier.slot_bytes <= INLINE_BYTES:
            return self._digest(slots)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._digest, slots)

    async def verified_prefix(self, slots: Sequence[int], expected: Sequence[int]) -> int:
        """How many leading slots hold what was announced."""
        if not self.enabled:
            return len(slots)
        for at, digest in enumerate(await self.fresh(slots)):
            if digest != expected[at]:
                return at
        return len(slots)

    def _digest(self, slots: Sequence[int]) -> list[int]:
        array = self._tier.array
        return [xxhash.xxh3_64_intdigest(array[slot].data) for slot in slots]
