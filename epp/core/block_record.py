"""What is known of one engine block name."""

from __future__ import annotations

from msgspec import Struct

from epp.core.types import BlockKey, CacheTier, EngineBlockHash


class BlockRecord(Struct, gc=False):
    """Waiting while `key` is None. Copies are counted per tier. A struct because millions are made: it
    costs a third of an ordinary object, and no garbage collection ever looks at it (no cycle to find)."""

    key: BlockKey | None
    device: int = 0  # copies
    cpu: int = 0
    parent: EngineBlockHash | None = None  # while waiting
    payload: bytes | None = None  # while waiting: what to hash, once the parent is known

    def copies(self, tier: CacheTier) -> int:
        return self.device if tier is CacheTier.DEVICE else self.cpu

    def add(self, tier: CacheTier, delta: int) -> int:
        """Change the count and return it."""
        if tier is CacheTier.DEVICE:
            self.device += delta
            return self.device
        self.cpu += delta
        return self.cpu
