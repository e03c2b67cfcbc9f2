"""The records of one endpoint and what they have in common: copies, claims, bytes, and those that wait.

See `engine_blocks`, which changes them. It must not know how keys are rooted, nor other endpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from epp.core.block_record import BlockRecord, BlockRecords
from epp.core.block_table import BlockTable
from epp.core.byte_budget import RECORD_BYTES, WAITING_BYTES
from epp.core.endpoint_claims import EndpointClaims
from epp.core.hashing import BlockHasher
from epp.core.index_limits import IndexLimits as IndexLimits
from epp.core.index_limits import Tally as Tally
from epp.core.name_sample import NameSample
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_groups import WindowGroups

TIERS = (CacheTier.DEVICE, CacheTier.CPU)


class EndpointRecords:
    """Records of one endpoint between two clears, and their claims in the shared `table`."""

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

    # --- waiting ------------------------------------------------------------------------------------

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
