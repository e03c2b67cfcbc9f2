"""What is known of one engine block name."""

from __future__ import annotations

from epp.core.types import BlockKey, CacheTier, EngineBlockHash


class BlockRecord:
    """Waiting while `key` is None. Copies are counted per tier."""

    __slots__ = ("cpu", "device", "key", "parent", "payload")

    def __init__(self, key: BlockKey | None) -> None:
        self.key = key
        self.device = 0  # copies
        self.cpu = 0
        self.parent: EngineBlockHash | None = None  # while waiting
        self.payload: bytes | None = None  # while waiting: what to hash, once the parent is known

    def copies(self, tier: CacheTier) -> int:
        return self.device if tier is CacheTier.DEVICE else self.cpu

    def add(self, tier: CacheTier, delta: int) -> int:
        """Change the count and return it."""
        if tier is CacheTier.DEVICE:
            self.device += delta
            return self.device
        self.cpu += delta
        return self.cpu
