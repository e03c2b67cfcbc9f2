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
from collections.abc import Iterator, Mapping

from epp.core.block_record import BlockRecord, BlockRecords, Row
from epp.core.block_table import BlockTable, require
from epp.core.byte_budget import RECORD_BYTES, ROW_BYTES, SET_BYTES, WAITING_BYTES
from epp.core.endpoint_claims import EndpointClaims
from epp.core.hashing import TOKEN_BYTES, BlockHasher
from epp.core.index_limits import IndexLimits as IndexLimits
from epp.core.index_limits import Tally as Tally
from epp.core.name_sample import NameSample
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_groups import WindowGroups

TIERS = (CacheTier.DEVICE, CacheTier.CPU)


class EngineBlocks:
    """Records of one endpoint between two clears. Writes its claims into the shared `table`."""

    def __init__(self, slot: int, table: BlockTable, hasher: BlockHasher, limits: IndexLimits) -> None:
        self.slot = slot
        self.block_size_tokens = 0  # learned from the first store that carries tokens
        self.main_group: int | None = None  # number of the full-attention group, where it has one
        self.groups: WindowGroups | None = None  # all others
        self.refused = 0
        self._sample = NameSample()
        self.forgotten_waiting = 0
        self._claims = EndpointClaims(slot, table)
        self._hasher = hasher
        self._limits = limits
        self._records = BlockRecords()
        self._waiting: OrderedDict[EngineBlockHash, None] = OrderedDict()  # oldest first
        self._waiting_bytes = 0
        self._children: dict[EngineBlockHash, dict[EngineBlockHash, None]] = {}  # of waiting blocks
        self._budget = table.budget
        self._bytes = 0

    @property
    def is_pristine(self) -> bool:
        """Nothing was learned since the last clear."""
        return not (len(self._records) or self.block_size_tokens or self.groups) and self.main_group is None

    def __len__(self) -> int:
        return len(self._records)

    @property
    def claims(self) -> Mapping[CacheTier, int]:
        """Engine hashes with a copy in each tier."""
        return self._claims.counts

    @property
    def remembered(self) -> int:
        return len(self._records.remembered)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def sampled_names(self) -> dict[BlockKey, EngineBlockHash]:
        """See `name_sample`."""
        return self._sample.pairs()

    @property
    def own_bytes(self) -> int:
        """What the records of this endpoint take, as `byte_budget` counts."""
        return self._bytes + (0 if self.groups is None else self.groups.own_bytes)

    def key_of(self, name: EngineBlockHash) -> BlockKey | None:
        """Our key of the engine's block, if its content is known. Mutates nothing."""
        return self._records.key_of(name)

    # --- stores ---------------------------------------------------------------------------------

    def hold(self, name: EngineBlockHash, key: BlockKey, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one more copy of block `name`, whose content is `key`."""
        known = self._records.key_of(name)
        if known is not None and known != key:  # one name for two contents: believe the first
            tally.skipped += 1
            return
        record = self._records.find(name)
        if record is None:
            if len(self._records) >= self._limits.max_blocks:
                tally.skipped += 1
                return
            budget = self._budget
            if budget.table_bytes + budget.endpoint_bytes >= budget.tight_bytes and budget.refuses(
                self.own_bytes
            ):
                self._refuse(1, tally)
                return
            record = BlockRecord(key)
            record.add(tier, 1)
            self._records.put(name, record)
            self._charge(RECORD_BYTES)
            self._claims.add(key, tier)
            if key < self._sample.below or self.groups is not None:
                self._announce(name, key)
            tally.stored += 1
        elif record.key is None:
            record.add(tier, 1)  # first, so that it cannot be forgotten as a block without copies
            if not self._settle(name, record, key, tally):
                return
        else:
            self._add_copy(record, key, tier)
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
        keys = self._hasher.chain(parent_key, packed, block_bytes // TOKEN_BYTES)
        if not self._hold_new(names, keys, tier):
            for name, key in zip(names, keys, strict=True):
                self.hold(name, key, tier, tally)
            return
        tally.stored += len(names)
        if keys and min(keys) < self._sample.below:
            below = self._sample.below
            for key, name in [pair for pair in zip(keys, names, strict=True) if pair[0] < below]:
                self._sample.note(key, name)

    def _hold_new(self, names: tuple[EngineBlockHash, ...], keys: list[BlockKey], tier: CacheTier) -> bool:
        """The records and claims of blocks on the device of which nothing is known, nor awaited.
        False: something is, or there may be no room; nothing was done."""
        if (
            tier is not CacheTier.DEVICE
            or self._children
            or len(self._records) + len(names) > self._limits.max_blocks
            or (self.groups is not None and self.groups.awaited)
            or self._budget.is_tight_with(len(names) * (RECORD_BYTES + ROW_BYTES) + SET_BYTES)
            or not self._records.put_new(names, keys)
        ):
            return False
        self._charge(RECORD_BYTES * len(names))
        self._claims.add_all(keys, tier)
        return True

    def hold_by_name(self, name: EngineBlockHash, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one more copy of a block known only by its name; waits if it is not known."""
        record = self._records.find(name)
        if record is not None and record.key is not None:
            self._add_copy(record, record.key, tier)
            tally.stored += 1
            return
        if record is None and self._budget.is_tight and self._budget.refuses(self.own_bytes):
            self._refuse(1, tally)
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
        record = self._records.find(name)
        if record is not None and record.key is not None:
            self._add_copy(record, record.key, tier)
            tally.stored += 1
            return
        if record is None and self._budget.is_tight and self._budget.refuses(self.own_bytes):
            self._refuse(1, tally)
            return
        tally.orphans += 1
        if record is None:
            record = self._start_waiting(name)
        if record.payload is None:
            record.parent, record.payload = parent, payload
            self._waiting_bytes += len(payload)
            self._charge(len(payload))
            self._children.setdefault(parent, {})[name] = None
        record.add(tier, 1)
        self._trim_waiting()

    def _start_waiting(self, name: EngineBlockHash) -> BlockRecord:
        record = BlockRecord(None)
        self._records.put(name, record)
        self._waiting[name] = None
        self._charge(WAITING_BYTES)
        return record

    def _settle(self, name: EngineBlockHash, record: BlockRecord, key: BlockKey, tally: Tally) -> bool:
        """A waiting block's content is known now: claim the copies it already has. False: refused."""
        self._stop_waiting(name, record)
        if self._budget.is_tight and self._budget.refuses(self.own_bytes):
            self._refuse(record.device + record.cpu, tally)
            self._records.discard(name)
            return False
        record.key = key
        self._charge(RECORD_BYTES)
        self._announce(name, key)
        for tier in TIERS:
            copies = record.copies(tier)
            if copies:
                self._claims.add(key, tier)
                tally.stored += copies
        if not (record.device or record.cpu):
            self._remember(name, key)
        return True

    def _settle_descendants(self, name: EngineBlockHash, key: BlockKey, tally: Tally) -> None:
        found = [(name, key)]
        while found:
            parent, parent_key = found.pop()
            for child in self._children.pop(parent, {}):
                record = self._records.find(child)
                # only blocks with content are anybody's child
                assert record is not None
                assert record.payload is not None
                child_key = self._hasher.next_key(parent_key, record.payload)
                self._settle(child, record, child_key, tally)
                found.append((child, child_key))

    def _stop_waiting(self, name: EngineBlockHash, record: BlockRecord) -> None:
        del self._waiting[name]
        self._charge(-WAITING_BYTES - len(record.payload or b""))
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
            record = self._records.find(oldest)
            assert record is not None
            self._stop_waiting(oldest, record)
            self._records.discard(oldest)
            self.forgotten_waiting += 1

    def _add_copy(self, record: BlockRecord, key: BlockKey, tier: CacheTier) -> None:
        if record.add(tier, 1) == 1:
            self._claims.add(key, tier)

    def _announce(self, name: EngineBlockHash, key: BlockKey) -> None:
        """The content of `name` has become known."""
        if key < self._sample.below:
            self._sample.note(key, name)
        if self.groups is not None and name in self.groups.awaited:
            self.groups.settle(name, key)

    def _refuse(self, blocks: int, tally: Tally) -> None:
        tally.refused += blocks
        self.refused += blocks

    def _charge(self, bytes_: int) -> None:
        self._bytes += bytes_
        self._budget.charge(bytes_)

    # --- removals -------------------------------------------------------------------------------

    def remove_all(self, names: tuple[EngineBlockHash, ...], tier: CacheTier, tally: Tally) -> None:
        """Mutates: `remove` for each, at once where each has one copy, on the device."""
        keys = self._records.take_single(names) if tier is CacheTier.DEVICE else None
        if keys is None:
            for name in names:
                self.remove(name, tier, tally)
            return
        tally.removed += len(names)
        self._claims.drop_all(keys, tier)
        for name, key in zip(names, keys, strict=True):
            self._records.remembered[name] = key
        self._forget_oldest()

    def remove(self, name: EngineBlockHash, tier: CacheTier, tally: Tally) -> None:
        """Mutates: one copy fewer. A copy that we never heard of is ignored."""
        record = self._records.find_held(name)
        if record is None or not record.copies(tier):
            return
        tally.removed += 1
        left = record.add(tier, -1)
        if record.key is None:
            # its content, if known, may still be what its children wait for
            if record.payload is None and not (record.device or record.cpu):
                self._stop_waiting(name, record)
                self._records.discard(name)
            return
        if not left:
            self._claims.drop(record.key, tier)
            if not (record.device or record.cpu):
                self._remember(name, record.key)

    def _remember(self, name: EngineBlockHash, key: BlockKey) -> None:
        self._records.remember(name, key)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        remembered = self._records.remembered
        too_many = len(remembered) - self._limits.max_remembered_blocks
        if too_many > 0:
            for _ in range(too_many):
                remembered.popitem(last=False)
            self._charge(-RECORD_BYTES * too_many)

    # --- dump and restore ------------------------------------------------------------------------

    def records(self) -> Iterator[Row]:
        """Name, key, device and CPU copies of all but the waiting blocks; remembered ones last, the
        oldest of them first."""
        yield from self._records.held()
        for name, key in self._records.remembered.items():
            yield name, key, 0, 0

    def put(self, name: EngineBlockHash, key: BlockKey, device: int, cpu: int) -> bool:
        """Mutates: take over one of another's `records`. False: there is one of that name."""
        if name in self._records:
            return False
        record = BlockRecord(key, device, cpu)
        self._charge(RECORD_BYTES)
        for tier in TIERS:
            if record.copies(tier):
                self._claims.add(key, tier)
        if device or cpu:
            self._records.put(name, record)
        else:
            self._remember(name, key)
        self._announce(name, key)
        return True

    # --- the end, and checks --------------------------------------------------------------------

    def sweep(self, max_records: int) -> int:
        """Mutates: take up to `max_records` records, and their claims, out. Returns how many.

        For records that nobody asks about any more: the other tables are not kept in order.
        """
        done = 0
        while done < max_records and len(self._records):
            record = self._records.pop()
            for tier in TIERS:
                if record.key is not None and record.copies(tier):
                    self._claims.drop(record.key, tier)
            done += 1
        if not len(self._records):
            self.release()
        return done

    def release(self) -> None:
        """Mutates: nothing is held any more; give the bytes back."""
        if self.groups is not None:
            self.groups.release()
        self._charge(-self._bytes)

    def held(self) -> Iterator[tuple[BlockKey, CacheTier]]:
        """Every claim, once per engine hash and tier."""
        for _, key, device, cpu in self._records.held():
            if device:
                yield key, CacheTier.DEVICE
            if cpu:
                yield key, CacheTier.CPU

    def check_integrity(self) -> None:
        """Raises IndexCorrupt if the side tables contradict the records."""
        waiting = dict(self._records.waiting())
        claims = list(self.held())
        require(waiting.keys() == self._waiting.keys(), "waiting set is off")
        require(all(row[2] or row[3] for row in self._records.held()), "a block without copies is held")
        names = [row[0] for row in self.records()]
        require(len(set(names)) == len(names), "a name is both held and remembered")
        payloads = [r.payload for r in waiting.values() if r.payload is not None]
        require(self._waiting_bytes == sum(map(len, payloads)), "waiting bytes are off")
        require(sum(map(len, self._children.values())) == len(payloads), "children are off")
        self._claims.check_integrity(claims)
        if self.groups is not None:
            self.groups.check_integrity()
        known = len(self._records) - len(waiting)
        waits = WAITING_BYTES * len(waiting) + self._waiting_bytes
        require(self._bytes == RECORD_BYTES * known + waits, "bytes are off")
