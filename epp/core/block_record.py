"""What is known of the engine block names of one endpoint, by name.

Nearly all blocks have one copy, on the device, and a content that is known: such a record is just the key,
an integer that the block table has anyway. All others are `BlockRecord`s. Names without a copy are kept
apart, in the order in which they lost their last one. Which is which must not show outside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import cast

from msgspec import Struct

from epp.core.types import BlockKey, CacheTier, EngineBlockHash

Row = tuple[EngineBlockHash, BlockKey, int, int]  # name, key, device copies, CPU copies


class BlockRecord(Struct, gc=False):
    """Waiting while `key` is None. Copies are counted per tier. A struct because many are made: it
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


class BlockRecords:
    """Records of one endpoint. `remembered`: names without a copy whose content is known, oldest first."""

    __slots__ = ("_records", "remembered")

    def __init__(self) -> None:
        self._records: dict[EngineBlockHash, BlockKey | BlockRecord] = {}
        # a plain dict looks for its first key past all that were deleted in front of it
        self.remembered: OrderedDict[EngineBlockHash, BlockKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records) + len(self.remembered)

    def __contains__(self, name: EngineBlockHash) -> bool:
        return name in self._records or name in self.remembered

    def key_of(self, name: EngineBlockHash) -> BlockKey | None:
        """The key, if the content is known."""
        found = self._records.get(name)
        if found is None:
            return self.remembered.get(name)
        return found.key if isinstance(found, BlockRecord) else found

    def find(self, name: EngineBlockHash) -> BlockRecord | None:
        """The record, to read and to change; None: there is none. Mutates: the form that is kept, and a
        remembered name is no longer remembered: the caller adds a copy or calls `remember`."""
        found = self._records.get(name)
        if isinstance(found, BlockRecord):
            return found
        if found is not None:
            record = BlockRecord(found, device=1)
        elif name in self.remembered:
            record = BlockRecord(self.remembered.pop(name))
        else:
            return None
        self._records[name] = record
        return record

    def find_held(self, name: EngineBlockHash) -> BlockRecord | None:
        """As `find`, but None for a remembered name, too: it stays remembered."""
        return self.find(name) if name in self._records else None

    def put(self, name: EngineBlockHash, record: BlockRecord) -> None:
        """Mutates: a new name."""
        if record.key is not None and record.device == 1 and not record.cpu:
            self._records[name] = record.key
        else:
            self._records[name] = record

    def put_new(self, names: Sequence[EngineBlockHash], keys: Sequence[BlockKey]) -> bool:
        """Mutates: one device copy of each, if all the names are new and differ; else nothing, False."""
        records = self._records
        if not records.keys().isdisjoint(names):
            return False
        if self.remembered and not self.remembered.keys().isdisjoint(names):
            return False
        size = len(records)
        for name, key in zip(names, keys, strict=True):  # cheaper than a dict for `update`
            records[name] = key
        if len(records) - size == len(names):
            return True
        for name in set(names):
            del records[name]
        return False

    def take_single(self, names: Sequence[EngineBlockHash]) -> list[BlockKey] | None:
        """Mutates: the names are gone. Their keys, if each has one device copy and no other and all
        differ; else None, and nothing was done."""
        records = self._records
        found = list(map(records.get, names))
        if set(map(type, found)) != {int} or len(set(names)) != len(names):
            return None
        for name in names:
            del records[name]
        return cast("list[BlockKey]", found)

    def discard(self, name: EngineBlockHash) -> None:
        """Mutates: a name with a record is forgotten."""
        del self._records[name]

    def remember(self, name: EngineBlockHash, key: BlockKey) -> None:
        """Mutates: the name has no copy left."""
        self._records.pop(name, None)
        self.remembered[name] = key

    def pop(self) -> BlockRecord:
        """Mutates: takes any record out. Raises KeyError if there is none."""
        if not self._records:
            return BlockRecord(self.remembered.popitem()[1])
        _, found = self._records.popitem()
        return found if isinstance(found, BlockRecord) else BlockRecord(found, device=1)

    def waiting(self) -> Iterator[tuple[EngineBlockHash, BlockRecord]]:
        for name, found in self._records.items():
            if isinstance(found, BlockRecord) and found.key is None:
                yield name, found

    def held(self) -> Iterator[Row]:
        """All names with a copy whose content is known."""
        for name, found in self._records.items():
            if not isinstance(found, BlockRecord):
                yield name, found, 1, 0
            elif found.key is not None:
                yield name, found.key, found.device, found.cpu
