"""How a prefix index changes: endpoints come, go and are cleared; their engines store and remove blocks.

The rules of events, for both implementations: a block whose content an event does not prove makes no
claim and is counted. It must not know sequence numbers or claim states (`event_stream`), nor time, nor I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.block_table import BlockTable
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
    store_in_group,
)
from epp.core.hashing import (
    TOKEN_BYTES,
    BlockHasher,
    InvalidTokens,
    pack_tokens,
    split_extra_keys,
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


class IndexWriter:
    """The writing half of `prefix_index.PythonPrefixIndex`."""

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
