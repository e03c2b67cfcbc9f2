"""What one engine says it holds, in the engine's own block names, and what that means in our keys.

One record per engine block hash:

    waiting     content unknown (token-less store, or parent not seen yet): no claim
    held        key known, at least one copy in a tier: claimed in the block table
    remembered  key known, no copy left: no claim, but later stores and children can still refer to it

Engines may store a hash twice and remove it once, so copies are counted per tier. Waiting and
remembered records are bounded; the oldest go first, which can only make us claim less.
This module must not know how keys are rooted, nor other endpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from msgspec import Struct

from epp.core.block_table import BlockTable, require
from epp.core.events import Applied
from epp.core.hashing import TOKEN_BYTES, BlockHasher
from epp.core.types import BlockKey, CacheTier, EngineBlockHash

TIERS = (CacheTier.DEVICE, CacheTier.CPU)


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds per endpoint. When full: new blocks make no claim (counted as skipped); waiting and
    remembered blocks are forgotten oldest first."""

    max_blocks: int = 4_000_000
    max_waiting_blocks: int = 16_384
    max_waiting_bytes: int = 16 << 20
    max_remembered_blocks: int = 4_096


@dataclass(slots=True)
class Tally:
    """Running counts of one batch, in block stores and removals."""

    stored: int = 0
    removed: int = 0
    orphans: int = 0
    unresolved: int = 0
    skipped: int = 0

    def applied(self) -> Applied:
        return Applied(self.stored, self.removed, self.orphans, self.unresolved, self.skipped)


class _Record(Struct, gc=False):
    """A struct because millions are made: it costs a third of an ordinary object, and no garbage
    collection ever looks at it (there is no cycle to find)."""

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


class EngineBlocks:
    """Records of one endpoint between two clears. Writes its claims into the shared `table`."""

    def __init__(self, slot: int, table: BlockTable, hasher: BlockHasher, limits: IndexLimits) -> None:
        self.slot = slot
        self.block_size_tokens = 0  # learned from the first store that carries tokens
        self.foreign_groups: set[int] = set()  # groups whose blocks prove no prefix
        self.forgotten_waiting = 0
        self.claims = {CacheTier.DEVICE: 0, CacheTier.CPU: 0}  # engine hashes with a copy in the tier
        self._table = table
        self._hasher = hasher
        self._limits = limits
        self._records: dict[EngineBlockHash, _Record] = {}
        # FIFO sets; a plain dict looks for its first key past all that were deleted in front of it
        self._waiting: OrderedDict[EngineBlockHash, None] = OrderedDict()
        self._waiting_bytes = 0
        self._remembered: OrderedDict[EngineBlockHash, None] = OrderedDict()
        self._children: dict[EngineBlockHash, dict[EngineBlockHash, None]] = {}  # of waiting blocks
        # further hashes of this engine with the same key and tier (only after a change of its hashing)
        self._aliases: dict[tuple[BlockKey, CacheTier], int] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def key_of(self, name: EngineBlockHash) -> BlockKey | None:
        """Our key of the engine's block, if its content is known. Mutates nothing."""
        record = self._records.get(name)
        return None if record is None else record.key

    # --- stores ---------------------------------------------------------------------------------

    def hold(self, name: EngineBlockHash, key: BlockKey, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one more copy of block `name`, whose content is `key`."""
        record = self._records.get(name)
        if record is None:
            if len(self._records) >= self._limits.max_blocks:
                tally.skipped += 1
                return
            record = self._records[name] = _Record(key)
            record.add(tier, 1)
            self._claim(key, tier)
        elif record.key is None:
            self._settle(name, record, key, tally)
            self._add_copy(name, record, key, tier)
        elif record.key == key:
            self._add_copy(name, record, key, tier)
        else:  # one name for two contents: believe the first
            tally.skipped += 1
            return
        tally.stored += 1
        if name in self._children:
            self._settle_descendants(name, key, tally)

    def hold_chain(
        self,
        names: tuple[EngineBlockHash, ...],
        parent_key: BlockKey,
        packed: bytes,
        block_bytes: int,
        tier: CacheTier,
        tally: Tally,
    ) -> None:
        """Mutates: `hold` for a chain of blocks that are nothing but tokens, all at once where nothing
        is known of any of them."""
        records, is_device = self._records, tier is CacheTier.DEVICE
        keys = self._hasher.chain(parent_key, packed, block_bytes // TOKEN_BYTES)
        made = map(_Record, keys, repeat(int(is_device)), repeat(int(not is_device)))
        fresh = dict(zip(names, made, strict=True))
        if (
            self._children
            or len(records) + len(names) > self._limits.max_blocks
            or not records.keys().isdisjoint(names)
            or len(fresh) != len(names)
        ):
            for name, key in zip(names, keys, strict=True):
                self.hold(name, key, tier, tally)
            return
        records.update(fresh)
        self.claims[tier] += len(names)
        tally.stored += len(names)
        for key in self._table.hold_all(keys, self.slot, tier):
            self._aliases[key, tier] = self._aliases.get((key, tier), 0) + 1

    def hold_by_name(self, name: EngineBlockHash, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one more copy of a block known only by its name; waits if it is not known."""
        record = self._records.get(name)
        if record is not None and record.key is not None:
            self._add_copy(name, record, record.key, tier)
            tally.stored += 1
            return
        tally.unresolved += 1
        if record is None:
            record = self._start_waiting(name)
        record.add(tier, 1)
        self._trim_waiting()

    def hold_orphan(
        self, name: EngineBlockHash, parent: EngineBlockHash, payload: bytes, tier: CacheTier, tally: Tally
    ) -> None:
        """Mutates: one more copy of a block whose parent is unknown; waits for the parent."""
        record = self._records.get(name)
        if record is not None and record.key is not None:
            self._add_copy(name, record, record.key, tier)
            tally.stored += 1
            return
        tally.orphans += 1
        if record is None:
            record = self._start_waiting(name)
        if record.payload is None:
            record.parent, record.payload = parent, payload
            self._waiting_bytes += len(payload)
            self._children.setdefault(parent, {})[name] = None
        record.add(tier, 1)
        self._trim_waiting()

    def _start_waiting(self, name: EngineBlockHash) -> _Record:
        record = self._records[name] = _Record(None)
        self._waiting[name] = None
        return record

    def _settle(self, name: EngineBlockHash, record: _Record, key: BlockKey, tally: Tally) -> None:
        """A waiting block's content is known now: claim the copies it already has."""
        self._stop_waiting(name, record)
        record.key = key
        for tier in TIERS:
            copies = record.copies(tier)
            if copies:
                self._claim(key, tier)
                tally.stored += copies
        if not (record.device or record.cpu):
            self._remember(name)

    def _settle_descendants(self, name: EngineBlockHash, key: BlockKey, tally: Tally) -> None:
        found = [(name, key)]
        while found:
            parent, parent_key = found.pop()
            for child in self._children.pop(parent, {}):
                record = self._records[child]
                assert record.payload is not None  # only blocks with content are anybody's child
                child_key = self._hasher.next_key(parent_key, record.payload)
                self._settle(child, record, child_key, tally)
                found.append((child, child_key))

    def _stop_waiting(self, name: EngineBlockHash, record: _Record) -> None:
        del self._waiting[name]
        if record.payload is not None and record.parent is not None:
            self._waiting_bytes -= len(record.payload)
            siblings = self._children.get(record.parent)
            if siblings is not None:
                siblings.pop(name, None)
                if not siblings:
                    del self._children[record.parent]
        record.parent = record.payload = None

    def _trim_waiting(self) -> None:
        limits = self._limits
        while (
            len(self._waiting) > limits.max_waiting_blocks or self._waiting_bytes > limits.max_waiting_bytes
        ):
            oldest = next(iter(self._waiting))
            self._stop_waiting(oldest, self._records[oldest])
            del self._records[oldest]
            self.forgotten_waiting += 1

    def _add_copy(self, name: EngineBlockHash, record: _Record, key: BlockKey, tier: CacheTier) -> None:
        if not (record.device or record.cpu):
            del self._remembered[name]
        if record.add(tier, 1) == 1:
            self._claim(key, tier)

    def _claim(self, key: BlockKey, tier: CacheTier) -> None:
        self.claims[tier] += 1
        if not self._table.hold(key, self.slot, tier):
            self._aliases[key, tier] = self._aliases.get((key, tier), 0) + 1

    # --- removals -------------------------------------------------------------------------------

    def remove(self, name: EngineBlockHash, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one copy fewer. A copy that we never heard of is ignored."""
        record = self._records.get(name)
        if record is None or not record.copies(tier):
            return
        tally.removed += 1
        left = record.add(tier, -1)
        if record.key is None:
            # its content, if known, may still be what its children wait for
            if record.payload is None and not (record.device or record.cpu):
                self._stop_waiting(name, record)
                del self._records[name]
            return
        if not left:
            self._unclaim(record.key, tier)
            if not (record.device or record.cpu):
                self._remember(name)

    def _unclaim(self, key: BlockKey, tier: CacheTier) -> None:
        self.claims[tier] -= 1
        others = self._aliases.get((key, tier), 0)
        if not others:
            self._table.drop(key, self.slot, tier)
        elif others == 1:
            del self._aliases[key, tier]
        else:
            self._aliases[key, tier] = others - 1

    def _remember(self, name: EngineBlockHash) -> None:
        self._remembered[name] = None
        if len(self._remembered) > self._limits.max_remembered_blocks:
            oldest, _ = self._remembered.popitem(last=False)
            del self._records[oldest]

    # --- the end, and checks --------------------------------------------------------------------

    def sweep(self, max_records: int) -> int:
        """Mutates: take up to `max_records` records, and their claims, out. Returns how many.

        For records that nobody asks about any more: the other tables are not kept in order.
        """
        done = 0
        while done < max_records and self._records:
            _, record = self._records.popitem()
            if record.key is not None:
                self._table.drop_slot(record.key, self.slot)
            done += 1
        return done

    def held(self) -> Iterator[tuple[BlockKey, CacheTier]]:
        """Every claim, once per engine hash and tier."""
        for record in self._records.values():
            if record.key is not None:
                for tier in TIERS:
                    if record.copies(tier):
                        yield record.key, tier

    def check_integrity(self) -> None:
        """Raises IndexCorrupt if the side tables contradict the records."""
        waiting = {name for name, record in self._records.items() if record.key is None}
        idle = {name for name, r in self._records.items() if r.key is not None and not (r.device or r.cpu)}
        claims = list(self.held())
        require(waiting == self._waiting.keys(), "waiting set is off")
        require(idle == self._remembered.keys(), "remembered set is off")
        payloads = [r.payload for r in self._records.values() if r.payload is not None]
        require(self._waiting_bytes == sum(map(len, payloads)), "waiting bytes are off")
        require(sum(map(len, self._children.values())) == len(payloads), "children are off")
        for tier in TIERS:
            require(self.claims[tier] == sum(1 for claim in claims if claim[1] is tier), "claim count is off")
        require(sum(self._aliases.values()) == len(claims) - len(set(claims)), "aliases are off")


def payloads(packed: bytes, block_bytes: int, extras: Sequence[bytes]) -> list[bytes]:
    """Bytes to hash for each block: its tokens, then its extra keys."""
    return [packed[i * block_bytes : (i + 1) * block_bytes] + extra for i, extra in enumerate(extras)]
