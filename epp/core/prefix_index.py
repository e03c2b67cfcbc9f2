"""Which endpoint holds how much of a prompt, in which tier, exactly as the engines reported it.

`PrefixIndex` (`index_interface`) is the interface; `PythonPrefixIndex` is the reference implementation,
which always works and which any compiled twin has to agree with. Nothing is guessed: a block whose
content an event does not prove makes no claim and is counted. Linear walk, interned bitsets, one hash pass.

It must not know sequence numbers or claim states (`event_stream`), nor time, nor I/O.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.block_table import ANY_LANE, CPU_LANE, DEVICE_LANE, LANES, BlockTable, require
from epp.core.engine_blocks import EngineBlocks
from epp.core.event_content import are_plain, contents_of, proves_content
from epp.core.events import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    Applied,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
)
from epp.core.group_events import (
    is_of_main_group,
    is_removed_from_main_group,
    keys_in_main_group,
    store_in_group,
)
from epp.core.hashing import (
    TOKEN_BYTES,
    BlockHasher,
    Family,
    InvalidTokens,
    PromptKeys,
    pack_tokens,
    split_extra_keys,
)
from epp.core.index_dump import (
    Columns,
    DumpRefused,
    EndpointDump,
    check_dump,
    dump_columns,
    dump_groups,
    load_records,
    restore_groups,
)
from epp.core.index_interface import Depths as Depths
from epp.core.index_interface import IndexStats as IndexStats
from epp.core.index_interface import PrefixIndex as PrefixIndex
from epp.core.index_interface import PrefixQuery as PrefixQuery
from epp.core.index_limits import IndexLimits, Tally
from epp.core.slots import Slots
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_groups import WindowGroups

_SWEEP_PER_EVENT = 64  # records of cleared endpoints taken out with every event, at least


@dataclass(slots=True)
class _Endpoint:
    model: str
    blocks: EngineBlocks


class PythonPrefixIndex:
    """The reference implementation."""

    scheme = BlockHasher.scheme

    def __init__(self, index_seed: bytes, limits: IndexLimits | None = None) -> None:
        self._hasher = BlockHasher(index_seed)
        self._limits = limits or IndexLimits()
        self._table = BlockTable(self._limits.max_bytes)
        self._endpoints: dict[EndpointId, _Endpoint] = {}
        self._slots = Slots()
        self._cleared: deque[EngineBlocks] = deque()  # no query asks for their slots any more

    # --- endpoints ------------------------------------------------------------------------------

    def add_endpoint(self, endpoint: EndpointId, model: str = "") -> None:
        if endpoint in self._endpoints:
            self.remove_endpoint(endpoint)
        self._endpoints[endpoint] = _Endpoint(model, self._new_blocks())
        self._table.budget.endpoints = len(self._endpoints)

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        known = self._endpoints.pop(endpoint, None)
        if known is not None:
            self._table.budget.endpoints = len(self._endpoints)
            self._retire(known.blocks)
            self.sweep(_SWEEP_PER_EVENT)

    def clear(self, endpoint: EndpointId) -> None:
        known = self._endpoints[endpoint]
        if not known.blocks.is_pristine:
            self._retire(known.blocks)
            known.blocks = self._new_blocks()

    def _new_blocks(self) -> EngineBlocks:
        return EngineBlocks(self._slots.take(), self._table, self._hasher, self._limits)

    def _retire(self, blocks: EngineBlocks) -> None:
        if len(blocks):
            self._cleared.append(blocks)
        else:
            blocks.release()
            self._slots.free.append(blocks.slot)

    def sweep(self, max_blocks: int) -> int:
        left = max_blocks
        while left > 0 and self._cleared:
            blocks = self._cleared[0]
            left -= blocks.sweep(left)
            if not len(blocks):
                self._cleared.popleft()
                self._slots.free.append(blocks.slot)
        return sum(len(blocks) for blocks in self._cleared)

    # --- events ---------------------------------------------------------------------------------

    def apply(self, endpoint: EndpointId, events: Iterable[Event]) -> Applied:
        known = self._endpoints[endpoint]
        tally = Tally()
        for event in events:
            self._apply_event(endpoint, known, event, tally)
        return tally.applied()

    def apply_batch(self, endpoint: EndpointId, batch: Batch) -> Applied:
        return self.apply(endpoint, batch.events)

    def _apply_event(self, endpoint: EndpointId, known: _Endpoint, event: Event, tally: Tally) -> None:
        if isinstance(event, BlockStored):
            self._store(known, event, tally)
            work = len(event.hashes)
        elif isinstance(event, BlockRemoved):
            self._remove(known.blocks, event, tally)
            work = len(event.hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            tally.removed += sum(known.blocks.claims.values())
            tally.clears += 1
            self.clear(endpoint)
            work = 0
        if self._cleared:
            self._sweep_after(work)

    def _sweep_after(self, blocks: int) -> None:
        # twice the work that can fill the index, so that clears can never pile up
        self.sweep(2 * blocks + _SWEEP_PER_EVENT)

    def _store(self, known: _Endpoint, event: BlockStored, tally: Tally) -> None:
        blocks = known.blocks
        if self._store_plain(known, event, tally):
            return
        if not is_of_main_group(blocks, event):
            self._store_in_group(known, event, tally)
            return
        names = self._hasher.names(event.hashes)
        if not proves_content(event):
            # tokens without extra keys cannot tell salted from unsalted content: go by name only
            for name in names:
                blocks.hold_by_name(name, event.tier, tally)
            return
        if self._store_tokens(known, event, names, tally):
            return
        contents = self._contents(blocks, event)
        if contents is None:
            tally.skipped += len(event.hashes)
            return
        tally.skipped += len(event.hashes) - len(contents)
        parent_key = self._parent_key(known, event)
        if parent_key is None and event.parent is not None:
            parent = self._hasher.name(event.parent)
            for name, content in zip(names, contents, strict=False):
                blocks.hold_orphan(name, parent, content, event.tier, tally)
                parent = name
            return
        assert parent_key is not None
        for name, content in zip(names, contents, strict=False):
            parent_key = self._hasher.next_key(parent_key, content)
            blocks.hold(name, parent_key, event.tier, tally)

    def _store_plain(self, known: _Endpoint, event: BlockStored, tally: Tally) -> bool:
        """What nearly all stores are: tokens and nothing else, on the device, of the learned size and
        group, the parent known. The rules are in `_store`; this only gets there in one step.
        False: not that case, nothing was done."""
        blocks, extras, parent = known.blocks, event.extra_keys, event.parent
        size, tokens, count = event.block_size_tokens, event.token_ids, len(event.hashes)
        if (
            parent is None
            or tokens is None
            or not size
            or size != blocks.block_size_tokens
            or not count
            or len(tokens) != size * count
            or (extras is not None and not extras.count(None) == len(extras) == count)
            or event.tier is not CacheTier.DEVICE
            or event.group_kind not in FULL_ATTENTION_KINDS
            or (event.group_idx is not None and event.group_idx != blocks.main_group)
        ):
            return False
        parent_key = blocks.key_of(self._hasher.name(parent))
        if parent_key is None:
            return False
        try:
            packed = self._pack(tokens)
        except InvalidTokens:
            return False
        names = self._hasher.names(event.hashes)
        blocks.hold_chain(names, parent_key, packed, size * TOKEN_BYTES, event.tier, tally)
        return True

    def _store_tokens(
        self, known: _Endpoint, event: BlockStored, names: tuple[EngineBlockHash, ...], tally: Tally
    ) -> bool:
        """A chain of nothing but tokens, of the learned size, whose parent is known: most stores by far.
        False: not that case, nothing was done."""
        size, tokens, extras = event.block_size_tokens, event.token_ids, event.extra_keys
        if tokens is None or not event.hashes or len(tokens) != size * len(event.hashes):
            return False
        if not size or size != known.blocks.block_size_tokens:
            return False
        if extras is not None and (len(extras) != len(event.hashes) or not are_plain(event)):
            return False
        parent_key = self._parent_key(known, event)
        if parent_key is None:
            return False
        try:
            packed = self._pack(tokens)
        except InvalidTokens:
            return False
        known.blocks.hold_chain(names, parent_key, packed, size * TOKEN_BYTES, event.tier, tally)
        return True

    def _pack(self, tokens: Sequence[int]) -> bytes:
        return pack_tokens(tokens)

    def _parent_key(self, known: _Endpoint, event: BlockStored) -> BlockKey | None:
        if event.parent is not None:
            return known.blocks.key_of(self._hasher.name(event.parent))
        first = event.extra_keys[0] if event.extra_keys else None
        salt, _ = split_extra_keys(first, event.lora_name, first_block=True)
        return self._hasher.root(known.model, event.lora_name, salt)

    def _contents(self, blocks: EngineBlocks, event: BlockStored) -> list[bytes] | None:
        """Bytes to hash per block. None: the event's numbers do not fit together, or its block size is
        not the endpoint's. Mutates: learns the block size."""
        size = event.block_size_tokens
        if blocks.block_size_tokens not in (0, size):
            return None
        contents = contents_of(event)
        if contents is not None:
            blocks.block_size_tokens = size
        return contents

    def _remove(self, blocks: EngineBlocks, event: BlockRemoved, tally: Tally) -> None:
        if self._remove_from_group(blocks, event):
            return
        blocks.remove_all(self._hasher.names(event.hashes), event.tier, tally)

    def _store_in_group(self, known: _Endpoint, event: BlockStored, tally: Tally) -> None:
        groups = self._groups_of(known.blocks)
        parent_key = self._parent_key(known, event)
        store_in_group(groups, known.blocks, event, self._hasher, parent_key, tally)

    def _remove_from_group(self, blocks: EngineBlocks, event: BlockRemoved) -> bool:
        """Mutates; False: it is a removal from the main group, nothing was done."""
        if is_removed_from_main_group(blocks, event):
            return False
        self._groups_of(blocks).remove(event.group_idx, self._hasher.names(event.hashes), event.tier)
        return True

    def _groups_of(self, blocks: EngineBlocks) -> WindowGroups:
        if blocks.groups is None:
            limits = self._limits
            blocks.groups = WindowGroups(self._table.budget, limits.max_blocks, limits.max_waiting_blocks)
        return blocks.groups

    # --- reading --------------------------------------------------------------------------------

    def depths(
        self,
        query: PrefixQuery,
        endpoints: Iterable[EndpointId],
        keys: dict[Family, PromptKeys] | None = None,
    ) -> dict[EndpointId, Depths]:
        result: dict[EndpointId, Depths] = {}
        families: dict[Family, list[tuple[EndpointId, int]]] = {}
        for endpoint in endpoints:
            known = self._endpoints[endpoint]
            result[endpoint] = Depths()
            if known.blocks.block_size_tokens:
                family = (known.model, known.blocks.block_size_tokens)
                families.setdefault(family, []).append((endpoint, known.blocks.slot))
        packed = pack_tokens(query.token_ids) if families else b""
        for (model, size), members in families.items():
            root = self._hasher.root(model, query.lora_name, query.cache_salt)
            chain = self._hasher.chain(root, packed, size)
            if keys is not None:
                keys[model, size] = array("Q", chain)
            depths = self._table.depths(chain, [slot for _, slot in members])
            for endpoint, slot in members:
                base = slot * LANES
                result[endpoint] = Depths(
                    depths[base + ANY_LANE], depths[base + DEVICE_LANE], depths[base + CPU_LANE]
                )
            self._limit(result, chain, [e for e, _ in members if self._endpoints[e].blocks.groups])
        return result

    def _limit(
        self, found: dict[EndpointId, Depths], keys: list[BlockKey], endpoints: Iterable[EndpointId]
    ) -> None:
        """Cut what was found at `endpoints` to what their other groups can serve, too."""
        for endpoint in endpoints:
            blocks = self._endpoints[endpoint].blocks
            size = blocks.block_size_tokens
            assert blocks.groups is not None
            if blocks.groups.refusal(size):
                found[endpoint] = Depths()
            elif found[endpoint].blocks:
                found[endpoint] = Depths(*blocks.groups.usable(keys, found[endpoint], size))

    def block_size_tokens(self, endpoint: EndpointId) -> int:
        return self._endpoints[endpoint].blocks.block_size_tokens

    def stats(self, endpoint: EndpointId) -> IndexStats:
        blocks = self._endpoints[endpoint].blocks
        groups = blocks.groups
        return IndexStats(
            device_blocks=blocks.claims[CacheTier.DEVICE],
            cpu_blocks=blocks.claims[CacheTier.CPU],
            waiting_blocks=blocks.waiting,
            forgotten_waiting_blocks=blocks.forgotten_waiting + (groups.forgotten if groups else 0),
            block_size_tokens=blocks.block_size_tokens,
            refused_blocks=blocks.refused + (groups.refused if groups else 0),
            window_blocks=groups.blocks if groups else 0,
            unsupported=self.unsupported(endpoint),
        )

    def unsupported(self, endpoint: EndpointId) -> str:
        blocks = self._endpoints[endpoint].blocks
        return "" if blocks.groups is None else blocks.groups.refusal(blocks.block_size_tokens)

    def key_of(self, endpoint: EndpointId, name: EngineBlockHash) -> BlockKey | None:
        return self._endpoints[endpoint].blocks.key_of(self._hasher.name(name))

    def stored_keys(self, endpoint: EndpointId, event: BlockStored) -> list[BlockKey]:
        known = self._endpoints[endpoint]
        return keys_in_main_group(known.blocks, event, self._hasher, self._parent_key(known, event))

    def names_of_sample(self, endpoint: EndpointId) -> dict[BlockKey, EngineBlockHash]:
        return self._endpoints[endpoint].blocks.sampled_names()

    @property
    def total_bytes(self) -> int:
        return self._table.budget.total_bytes

    # --- dump and restore -----------------------------------------------------------------------

    def dump(self, endpoint: EndpointId) -> EndpointDump:
        known = self._endpoints[endpoint]
        blocks = known.blocks
        columns, whole = self._columns(blocks)
        groups, all_groups_whole = dump_groups(blocks.groups)
        return EndpointDump(
            scheme=self._hasher.scheme,
            model=known.model,
            block_size_tokens=blocks.block_size_tokens,
            **columns._asdict(),
            complete=whole and all_groups_whole and not blocks.waiting,
            groups=groups,
            main_group=blocks.main_group,
        )

    def _columns(self, blocks: EngineBlocks) -> tuple[Columns, bool]:
        return dump_columns(blocks)

    def restore(self, endpoint: EndpointId, dump: EndpointDump) -> None:
        for _ in self.restore_steps(endpoint, dump, len(dump.names) or 1):
            pass

    def restore_steps(self, endpoint: EndpointId, dump: EndpointDump, step_blocks: int) -> Iterator[int]:
        known = self._endpoints[endpoint]
        blocks = known.blocks
        if not blocks.is_pristine:
            raise DumpRefused("not_empty")
        check_dump(dump, self._hasher.scheme, known.model, self._limits)
        try:
            blocks.block_size_tokens, blocks.main_group = dump.block_size_tokens, dump.main_group
            for start in range(0, dump.blocks, step_blocks):
                if known.blocks is not blocks or self._endpoints.get(endpoint) is not known:
                    raise DumpRefused("overtaken")
                stop = min(start + step_blocks, dump.blocks)
                self._load(blocks, dump, start, stop)
                yield stop
            if dump.groups:
                restore_groups(self._groups_of(blocks), dump)
        except DumpRefused:
            if known.blocks is blocks and self._endpoints.get(endpoint) is known:
                self.clear(endpoint)
            raise

    def _load(self, blocks: EngineBlocks, dump: EndpointDump, start: int, stop: int) -> None:
        load_records(blocks, dump.records(start, stop), self._limits, self._table.budget)

    def __len__(self) -> int:
        """Distinct blocks that anybody holds (cleared ones included until swept)."""
        return len(self._table)

    def check_integrity(self) -> None:
        expected: dict[BlockKey, int] = {}
        live = [known.blocks for known in self._endpoints.values()]
        for blocks in live:
            blocks.check_integrity()
        for blocks in [*live, *self._cleared]:
            base = blocks.slot * LANES
            for key, tier in blocks.held():
                lane = DEVICE_LANE if tier is CacheTier.DEVICE else CPU_LANE
                expected[key] = expected.get(key, 0) | 1 << base + lane | 1 << base + ANY_LANE
        self._table.check_integrity(expected)
        self._check_bytes([*live, *self._cleared])
        slots = [blocks.slot for blocks in [*live, *self._cleared]] + self._slots.free
        require(sorted(slots) == list(range(self._slots.count)), "slots are off")

    def _check_bytes(self, blocks: Iterable[EngineBlocks]) -> None:
        require(
            self._table.budget.endpoint_bytes == sum(b.own_bytes for b in blocks),
            "bytes of endpoints are off",
        )
