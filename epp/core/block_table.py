"""Block key -> which endpoints hold it, in which tiers: a dict of interned, counted bitsets.

Every endpoint has a *slot* of three bits: device, CPU and "any" (their OR, kept so that the walk
needs one AND a block). Equal sets are one object, so most steps of a walk are one identity
comparison; sets nobody refers to any more are dropped at once (without that, a busy fleet leaves
millions of dead sets behind).

It must not know engines, events or tokens. Mutating methods say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epp.core.byte_budget import ROW_BYTES, SET_BYTES, ByteBudget
from epp.core.types import BlockKey, CacheTier

LANES = 3  # bits a slot: device, CPU, any
DEVICE_LANE, CPU_LANE, ANY_LANE = 0, 1, 2
_LANE = {CacheTier.DEVICE: DEVICE_LANE, CacheTier.CPU: CPU_LANE}
_TIERS = (1 << DEVICE_LANE) | (1 << CPU_LANE)
_ANY = 1 << ANY_LANE
_SLOT = _TIERS | _ANY


class IndexCorrupt(RuntimeError):
    """The index contradicts itself: a bug of ours, never an engine's doing."""


def require(holds: bool, what: str) -> None:
    """Raises IndexCorrupt unless `holds`."""
    if not holds:
        raise IndexCorrupt(what)


class HolderSet:
    """An interned set of (slot, lane) bits and the number of blocks that have it."""

    __slots__ = ("bits", "blocks")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.blocks = 0


class BlockTable:
    """The table itself. One for all block sizes: keys of different sizes never meet."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.budget = ByteBudget(max_bytes)
        self._rows: dict[BlockKey, HolderSet] = {}
        self._sets: dict[int, HolderSet] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sets(self) -> int:
        return len(self._sets)

    def tiers(self, key: BlockKey, slot: int) -> CacheTier:
        """Tiers in which `slot` holds the block."""
        holders = self._rows.get(key)
        return CacheTier.NONE if holders is None else CacheTier((holders.bits >> slot * LANES) & _TIERS)

    def hold(self, key: BlockKey, slot: int, tier: CacheTier) -> bool:
        """Mutates: `slot` holds `key` in `tier`. False: it did already."""
        old = self._rows.get(key)
        before = 0 if old is None else old.bits
        after = before | ((1 << _LANE[tier] | _ANY) << slot * LANES)
        if after == before:
            return False
        self._replace(key, old, after)
        return True

    def hold_all(self, keys: Sequence[BlockKey], slot: int, tier: CacheTier) -> list[BlockKey]:
        """Mutates: `hold` for a chain of blocks, which mostly have the same holders: then all at once.
        Returns those that `slot` held already."""
        if not keys:
            return []
        rows = self._rows
        before = list(map(rows.get, keys))
        old = before[0]
        bits = 0 if old is None else old.bits
        after = bits | ((1 << _LANE[tier] | _ANY) << slot * LANES)
        new = None if after == bits else self._interned(after)
        changed = dict.fromkeys(keys, new)
        if new is None or before.count(old) != len(keys) or len(changed) != len(keys):
            self._drop_unused(new)
            return [key for key in keys if not self.hold(key, slot, tier)]
        rows.update(changed)  # type: ignore[arg-type]  # no None in it
        new.blocks += len(keys)
        if old is None:
            self.budget.table_bytes += ROW_BYTES * len(keys)
        else:
            old.blocks -= len(keys)
            self._drop_unused(old)
        return []

    def drop(self, key: BlockKey, slot: int, tier: CacheTier) -> None:
        """Mutates: `slot` holds `key` in `tier` no more (harmless if it never did)."""
        old = self._rows.get(key)
        if old is None:
            return
        after = old.bits & ~(1 << _LANE[tier] << slot * LANES)
        if not (after >> slot * LANES) & _TIERS:
            after &= ~(_ANY << slot * LANES)
        if after != old.bits:
            self._replace(key, old, after)

    def drop_slot(self, key: BlockKey, slot: int) -> None:
        """Mutates: `slot` holds `key` in no tier."""
        old = self._rows.get(key)
        if old is None:
            return
        after = old.bits & ~(_SLOT << slot * LANES)
        if after != old.bits:
            self._replace(key, old, after)

    def _replace(self, key: BlockKey, old: HolderSet | None, bits: int) -> None:
        budget = self.budget
        if old is None:
            budget.table_bytes += ROW_BYTES
        if bits:
            new = self._interned(bits)
            new.blocks += 1
            self._rows[key] = new
        else:
            del self._rows[key]
            budget.table_bytes -= ROW_BYTES
        if old is not None:
            old.blocks -= 1
            if not old.blocks:
                del self._sets[old.bits]
                budget.table_bytes -= SET_BYTES

    def _interned(self, bits: int) -> HolderSet:
        found = self._sets.get(bits)
        if found is None:
            found = self._sets[bits] = HolderSet(bits)
            self.budget.table_bytes += SET_BYTES
        return found

    def _drop_unused(self, holders: HolderSet | None) -> None:
        if holders is not None and not holders.blocks:
            del self._sets[holders.bits]
            self.budget.table_bytes -= SET_BYTES

    def depths(self, keys: Sequence[BlockKey], slots: Iterable[int]) -> dict[int, int]:
        """Contiguous depth from block 0 for every bit of every slot: `{slot * LANES + lane: depth}`.

        One linear walk to the first miss of the last endpoint. No bisection: sets are not prefix
        closed (evictions leave holes), so only the walk is exact.
        """
        alive = 0
        for slot in slots:
            alive |= _SLOT << slot * LANES
        depths: dict[int, int] = {}
        if not alive:
            return depths
        previous: HolderSet | None = None
        depth = -1
        for depth, holders in enumerate(map(self._rows.get, keys)):  # read after the loop
            if holders is previous and holders is not None:
                continue
            survivors = alive & holders.bits if holders is not None else 0
            if survivors != alive:
                _note(depths, alive ^ survivors, depth)
                alive = survivors
                if not alive:
                    return depths
            previous = holders
        _note(depths, alive, depth + 1)
        return depths

    def check_integrity(self, expected: dict[BlockKey, int]) -> None:
        """Compare with the bits that the endpoints' own records add up to.

        Raises:
            IndexCorrupt: the table, the interned sets or their counts are off.
        """
        require({key: holders.bits for key, holders in self._rows.items()} == expected, "rows are off")
        counts: dict[int, int] = {}
        for bits in expected.values():
            counts[bits] = counts.get(bits, 0) + 1
        require({bits: s.blocks for bits, s in self._sets.items()} == counts, "interned sets are off")
        size = ROW_BYTES * len(self._rows) + SET_BYTES * len(self._sets)
        require(self.budget.table_bytes == size, "table bytes are off")
        require(all(s is self._sets[s.bits] for s in self._rows.values()), "a set is not interned")


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        depths[lowest.bit_length() - 1] = depth
        bits ^= lowest
