"""The claims of one endpoint in the shared block table, counted by the engine's names for them.

An engine that changes its hashing names one content twice; the claim stays until both names are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from epp.core.block_table import BlockTable, require
from epp.core.types import BlockKey, CacheTier


class EndpointClaims:
    """Writes the bits of one slot."""

    __slots__ = ("_aliases", "_cpu", "_device", "_slot", "_table")

    def __init__(self, slot: int, table: BlockTable) -> None:
        self._device = self._cpu = 0  # names with a copy in the tier
        self._slot = slot
        self._table = table
        self._aliases: dict[tuple[BlockKey, CacheTier], int] = {}  # further names of the same content

    @property
    def counts(self) -> dict[CacheTier, int]:
        """Names with a copy in each tier."""
        return {CacheTier.DEVICE: self._device, CacheTier.CPU: self._cpu}

    def _count(self, tier: CacheTier, delta: int) -> None:
        if tier is CacheTier.DEVICE:
            self._device += delta
        else:
            self._cpu += delta

    def add(self, key: BlockKey, tier: CacheTier) -> None:
        """Mutates: one more name has a copy of `key` in `tier`."""
        self._count(tier, 1)
        if not self._table.hold(key, self._slot, tier):
            self._aliases[key, tier] = self._aliases.get((key, tier), 0) + 1

    def add_all(self, keys: Sequence[BlockKey], tier: CacheTier) -> None:
        """Mutates: `add` for the blocks of a chain."""
        self._count(tier, len(keys))
        for key in self._table.hold_all(keys, self._slot, tier):
            self._aliases[key, tier] = self._aliases.get((key, tier), 0) + 1

    def drop(self, key: BlockKey, tier: CacheTier) -> None:
        """Mutates: one name fewer."""
        self._count(tier, -1)
        others = self._aliases.get((key, tier), 0) if self._aliases else 0
        if not others:
            self._table.drop(key, self._slot, tier)
        elif others == 1:
            del self._aliases[key, tier]
        else:
            self._aliases[key, tier] = others - 1

    def drop_all(self, keys: Sequence[BlockKey], tier: CacheTier) -> None:
        """Mutates: `drop` for the blocks of a chain."""
        if self._aliases:
            for key in keys:
                self.drop(key, tier)
            return
        self._count(tier, -len(keys))
        self._table.drop_all(keys, self._slot, tier)

    def check_integrity(self, claims: Sequence[tuple[BlockKey, CacheTier]]) -> None:
        """Raises IndexCorrupt if the counts are not those of `claims`, one a name and tier."""
        for tier, count in self.counts.items():
            require(count == sum(1 for claim in claims if claim[1] is tier), "claim count is off")
        require(sum(self._aliases.values()) == len(claims) - len(set(claims)), "aliases are off")
