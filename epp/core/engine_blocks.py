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

from collections.abc import Iterator

from epp.core.block_record import BlockRecord, Row
from epp.core.block_table import require
from epp.core.byte_budget import RECORD_BYTES, ROW_BYTES, SET_BYTES, WAITING_BYTES
from epp.core.endpoint_records import TIERS, EndpointRecords
from epp.core.hashing import TOKEN_BYTES
from epp.core.index_limits import IndexLimits as IndexLimits
from epp.core.index_limits import Tally as Tally
from epp.core.types import BlockKey, CacheTier, EngineBlockHash


class EngineBlocks(EndpointRecords):
    """Records of one endpoint between two clears. Writes its claims into the shared `table`."""

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
        if record is None and len(self._records) >= self._limits.max_blocks:
            tally.skipped += 1
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
        if record is None and len(self._records) >= self._limits.max_blocks:
            tally.skipped += 1
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
