"""Block key -> which endpoints hold it, in which tiers: a dict of interned, counted bitsets.

Every endpoint has a *slot* of three bits: device, CPU and "any" (their OR, kept so that the walk
needs one AND a block). Equal sets are one object, so most steps of a walk are one identity
comparison; sets nobody refers to any more are dropped at once (without that, a busy fleet leaves
millions of dead sets behind).

It must not know engines, events or tokens. Mutating methods say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from epp.core.byte_budget import ROW_BYTES, SET_BYTES, ByteBudget
from epp.core.types import BlockKey, CacheTier

LANES = 3  # bits a slot: device, CPU, any
DEVICE_LANE, CPU_LANE, ANY_LANE = 0, 1, 2
_TIERS = (1 << DEVICE_LANE) | (1 << CPU_LANE)
_ANY = 1 << ANY_LANE
_SLOT = _TIERS | _ANY
_CPU = CacheTier.CPU  # compared by identity: the hash of an enum member is a Python call
_LANES_OF = [[lane for lane in range(LANES) if bits >> lane & 1] for bits in range(_SLOT + 1)]
_STRETCH = 512  # blocks looked up before the walk looks at them: most of a prompt may be unknown


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
        after = before | _bits_of(slot, tier)
        if after == before:
            return False
        self._replace(key, old, after)
        return True

    def hold_all(self, keys: Sequence[BlockKey], slot: int, tier: CacheTier) -> list[BlockKey]:
        """Mutates: `hold` for a chain of blocks, which mostly have the same holders: then all at once.
        Returns those that `slot` held already."""
        if not keys:
            return []
        before = list(map(self._rows.get, keys))
        old = before[0]
        if before.count(old) != len(keys):
            return [key for key in keys if not self.hold(key, slot, tier)]
        bits = 0 if old is None else old.bits
        after = bits | _bits_of(slot, tier)
        if after == bits:
            return list(keys)
        distinct = self._replace_all(keys, old, after)
        return [] if distinct == len(keys) else _repeated(keys)

    def drop_all(self, keys: Sequence[BlockKey], slot: int, tier: CacheTier) -> None:
        """Mutates: `drop` for blocks that mostly have the same holders: then all at once."""
        before = list(map(self._rows.get, keys))
        old = before[0] if before else None
        if old is None or before.count(old) != len(keys) or len(set(keys)) != len(keys):
            for key in keys:
                self.drop(key, slot, tier)
            return
        after = _without(old.bits, slot, tier)
        if after != old.bits:
            self._replace_all(keys, old, after)

    def drop(self, key: BlockKey, slot: int, tier: CacheTier) -> None:
        """Mutates: `slot` holds `key` in `tier` no more (harmless if it never did)."""
        old = self._rows.get(key)
        if old is None:
            return
        after = _without(old.bits, slot, tier)
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

    def _replace_all(self, keys: Sequence[BlockKey], old: HolderSet | None, bits: int) -> int:
        """`_replace` for blocks that all have the holders `old`. Returns how many of the keys differ; where
        `bits` are none, all have to."""
        rows, budget = self._rows, self.budget
        distinct = len(keys)
        if bits:
            new, size = self._interned(bits), len(rows)
            for key in keys:  # cheaper than a dict for `update`
                rows[key] = new
            distinct = len(rows) - size if old is None else len(set(keys))
            new.blocks += distinct
            if old is None:
                budget.table_bytes += ROW_BYTES * distinct
        else:
            for key in keys:
                del rows[key]
            budget.table_bytes -= ROW_BYTES * distinct
        if old is not None:
            old.blocks -= distinct
            if not old.blocks:
                del self._sets[old.bits]
                budget.table_bytes -= SET_BYTES
        return distinct

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
        for start in range(0, len(keys), _STRETCH):
            found = list(map(self._rows.get, keys[start : start + _STRETCH]))
            at = 0
            for holders, _ in groupby(found):  # equal sets are one object: a step a change, not a block
                at = found.index(holders, at)
                survivors = alive & holders.bits if holders is not None else 0
                if survivors != alive:
                    _note(depths, alive ^ survivors, start + at)
                    alive = survivors
                    if not alive:
                        return depths
                at += 1
        _note(depths, alive, len(keys))
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


def _bits_of(slot: int, tier: CacheTier) -> int:
    return (1 << CPU_LANE | _ANY if tier is _CPU else 1 << DEVICE_LANE | _ANY) << slot * LANES


def _without(bits: int, slot: int, tier: CacheTier) -> int:
    """`bits` where `slot` does not hold in `tier`."""
    after = bits & ~(1 << (CPU_LANE if tier is _CPU else DEVICE_LANE) + slot * LANES)
    return after if (after >> slot * LANES) & _TIERS else after & ~(_ANY << slot * LANES)


def _repeated(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Those that are in `keys` before: none but for a collision of hashes."""
    seen: set[BlockKey] = set()
    return [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        base = (bits.bit_length() - 1) // LANES * LANES
        lanes = bits >> base  # of the last slot: nothing is above it
        bits ^= lanes << base
        for lane in _LANES_OF[lanes]:
            depths[base + lane] = depth
