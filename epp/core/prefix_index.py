"""Which endpoint holds how much of a prompt, in which tier, exactly as the engines reported it.

`PrefixIndex` is the interface; `PythonPrefixIndex` is the reference implementation, which always
works and which any compiled twin has to agree with. Nothing is guessed: a block whose content an
event does not prove makes no claim and is counted. Design and measurements: linear walk, interned
bitsets, one hash pass per block size present.

It must not know sequence numbers or claim states (`event_stream`), nor time, nor I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine_plugin.identity import EndpointId
from epp.core.block_table import ANY_LANE, CPU_LANE, DEVICE_LANE, LANES, BlockTable, require
from epp.core.engine_blocks import EngineBlocks, IndexLimits, Tally, payloads
from epp.core.events import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    Applied,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
)
from epp.core.hashing import (
    TOKEN_BYTES,
    BlockHasher,
    InvalidTokens,
    encode_extra_keys,
    pack_tokens,
    split_extra_keys,
)
from epp.core.types import BlockKey, CacheTier

_MAX_FOREIGN_GROUPS = 64  # more groups than any model has; bounds what a hostile engine can add
_SWEEP_PER_EVENT = 64  # records of cleared endpoints taken out with every event, at least


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt, as far as cache contents depend on it."""

    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Depths(NamedTuple):
    """Contiguous blocks from block 0: in any tier (OR-ed per block), on the device, in CPU memory."""

    blocks: int = 0
    device_blocks: int = 0
    cpu_blocks: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What the index holds of one endpoint."""

    device_blocks: int = 0
    cpu_blocks: int = 0
    waiting_blocks: int = 0  # orphans and token-less stores whose content is not known yet
    forgotten_waiting_blocks: int = 0  # waiting blocks given up because the bound was reached
    block_size_tokens: int = 0  # 0: not learned yet


class PrefixIndex(Protocol):
    """Reads and writes of the index. Endpoints must be added first; unknown ones raise KeyError."""

    def add_endpoint(self, endpoint: EndpointId, model: str = "") -> None:
        """Mutates: start an empty record of `endpoint`; forgets an old one of the same name."""
        ...

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Mutates: forget everything about `endpoint`."""
        ...

    def apply(self, endpoint: EndpointId, events: Iterable[Event]) -> Applied:
        """Mutates: take over what the engine says, in order."""
        ...

    def apply_batch(self, endpoint: EndpointId, batch: Batch) -> Applied:
        """Mutates: `apply` for a whole message, in whatever form it is."""
        ...

    def clear(self, endpoint: EndpointId) -> None:
        """Mutates: drop all claims of `endpoint` at once, whatever their number."""
        ...

    def sweep(self, max_blocks: int) -> int:
        """Mutates: free up to `max_blocks` records of cleared endpoints; how many are left."""
        ...

    def depths(self, query: PrefixQuery, endpoints: Iterable[EndpointId]) -> dict[EndpointId, Depths]:
        """Contiguous prefix of the prompt at each endpoint. Mutates nothing.

        Raises:
            InvalidTokens: the prompt's ids are no unsigned 32-bit integers.
        """
        ...

    def block_size_tokens(self, endpoint: EndpointId) -> int:
        """Learned from the endpoint's events; 0: not yet."""
        ...

    def stats(self, endpoint: EndpointId) -> IndexStats: ...

    def check_integrity(self) -> None:
        """Raises IndexCorrupt if the index contradicts itself. Slow: for tests."""
        ...


@dataclass(slots=True)
class _Endpoint:
    model: str
    blocks: EngineBlocks


@dataclass(slots=True)
class _Slots:
    """Slot numbers, reused only after the last claim under them is gone."""

    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1


class PythonPrefixIndex:
    """The reference implementation."""

    def __init__(self, index_seed: bytes, limits: IndexLimits | None = None) -> None:
        self._hasher = BlockHasher(index_seed)
        self._limits = limits or IndexLimits()
        self._table = BlockTable()
        self._endpoints: dict[EndpointId, _Endpoint] = {}
        self._slots = _Slots()
        self._cleared: deque[EngineBlocks] = deque()  # no query asks for their slots any more

    # --- endpoints ------------------------------------------------------------------------------

    def add_endpoint(self, endpoint: EndpointId, model: str = "") -> None:
        if endpoint in self._endpoints:
            self.remove_endpoint(endpoint)
        self._endpoints[endpoint] = _Endpoint(model, self._new_blocks())

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        known = self._endpoints.pop(endpoint, None)
        if known is not None:
            self._retire(known.blocks)
            self.sweep(_SWEEP_PER_EVENT)

    def clear(self, endpoint: EndpointId) -> None:
        known = self._endpoints[endpoint]
        if len(known.blocks) or known.blocks.block_size_tokens:
            self._retire(known.blocks)
            known.blocks = self._new_blocks()

    def _new_blocks(self) -> EngineBlocks:
        return EngineBlocks(self._slots.take(), self._table, self._hasher, self._limits)

    def _retire(self, blocks: EngineBlocks) -> None:
        if len(blocks):
            self._cleared.append(blocks)
        else:
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
            self.clear(endpoint)
            work = 0
        if self._cleared:
            self._sweep_after(work)

    def _sweep_after(self, blocks: int) -> None:
        # twice the work that can fill the index, so that clears can never pile up
        self.sweep(2 * blocks + _SWEEP_PER_EVENT)

    def _store(self, known: _Endpoint, event: BlockStored, tally: Tally) -> None:
        blocks = known.blocks
        if event.group_kind not in FULL_ATTENTION_KINDS:
            tally.skipped += len(event.hashes)
            if event.group_idx is not None and len(blocks.foreign_groups) < _MAX_FOREIGN_GROUPS:
                blocks.foreign_groups.add(event.group_idx)
            return
        if event.token_ids is None or (event.tier is CacheTier.CPU and not event.has_extra_keys):
            # tokens without extra keys cannot tell salted from unsalted content: go by name only
            for name in event.hashes:
                blocks.hold_by_name(name, event.tier, tally)
            return
        if self._store_tokens(known, event, tally):
            return
        contents = self._contents(blocks, event)
        if contents is None:
            tally.skipped += len(event.hashes)
            return
        tally.skipped += len(event.hashes) - len(contents)
        parent_key = self._parent_key(known, event)
        if parent_key is None and event.parent is not None:
            parent = event.parent
            for name, content in zip(event.hashes, contents, strict=False):
                blocks.hold_orphan(name, parent, content, event.tier, tally)
                parent = name
            return
        assert parent_key is not None
        for name, content in zip(event.hashes, contents, strict=False):
            parent_key = self._hasher.next_key(parent_key, content)
            blocks.hold(name, parent_key, event.tier, tally)

    def _store_tokens(self, known: _Endpoint, event: BlockStored, tally: Tally) -> bool:
        """A chain of nothing but tokens, of the learned size, whose parent is known: most stores by far.
        False: not that case, nothing was done."""
        size, tokens, extras = event.block_size_tokens, event.token_ids, event.extra_keys
        if tokens is None or not event.hashes or len(tokens) != size * len(event.hashes):
            return False
        if not size or size != known.blocks.block_size_tokens:
            return False
        if extras is not None and (len(extras) != len(event.hashes) or not _are_plain(event)):
            return False
        parent_key = self._parent_key(known, event)
        if parent_key is None:
            return False
        try:
            packed = self._pack(tokens)
        except InvalidTokens:
            return False
        known.blocks.hold_chain(event.hashes, parent_key, packed, size * TOKEN_BYTES, event.tier, tally)
        return True

    def _pack(self, tokens: Sequence[int]) -> bytes:
        return pack_tokens(tokens)

    def _parent_key(self, known: _Endpoint, event: BlockStored) -> BlockKey | None:
        if event.parent is not None:
            return known.blocks.key_of(event.parent)
        first = event.extra_keys[0] if event.extra_keys else None
        salt, _ = split_extra_keys(first, event.lora_name, first_block=True)
        return self._hasher.root(known.model, event.lora_name, salt)

    def _contents(self, blocks: EngineBlocks, event: BlockStored) -> list[bytes] | None:
        """Bytes to hash per block, up to the first extra key of unknown type. None: the event's
        numbers do not fit together, or its block size is not the endpoint's."""
        size, count = event.block_size_tokens, len(event.hashes)
        tokens = event.token_ids
        if tokens is None or size <= 0 or not count or len(tokens) != size * count:
            return None
        if event.extra_keys is not None and len(event.extra_keys) != count:
            return None
        if size != blocks.block_size_tokens:
            if blocks.block_size_tokens:
                return None
            blocks.block_size_tokens = size
        try:
            packed = pack_tokens(tokens)
        except InvalidTokens:
            return None
        return payloads(packed, size * TOKEN_BYTES, _encode_extras(event))

    def _remove(self, blocks: EngineBlocks, event: BlockRemoved, tally: Tally) -> None:
        if event.group_idx is not None and event.group_idx in blocks.foreign_groups:
            tally.skipped += len(event.hashes)
            return
        for name in event.hashes:
            blocks.remove(name, event.tier, tally)

    # --- reading --------------------------------------------------------------------------------

    def depths(self, query: PrefixQuery, endpoints: Iterable[EndpointId]) -> dict[EndpointId, Depths]:
        result: dict[EndpointId, Depths] = {}
        families: dict[tuple[str, int], list[tuple[EndpointId, int]]] = {}
        for endpoint in endpoints:
            known = self._endpoints[endpoint]
            result[endpoint] = Depths()
            if known.blocks.block_size_tokens:
                family = (known.model, known.blocks.block_size_tokens)
                families.setdefault(family, []).append((endpoint, known.blocks.slot))
        packed = pack_tokens(query.token_ids) if families else b""
        for (model, size), members in families.items():
            root = self._hasher.root(model, query.lora_name, query.cache_salt)
            keys = self._hasher.chain(root, packed, size)
            depths = self._table.depths(keys, [slot for _, slot in members])
            for endpoint, slot in members:
                base = slot * LANES
                result[endpoint] = Depths(
                    depths[base + ANY_LANE], depths[base + DEVICE_LANE], depths[base + CPU_LANE]
                )
        return result

    def block_size_tokens(self, endpoint: EndpointId) -> int:
        return self._endpoints[endpoint].blocks.block_size_tokens

    def stats(self, endpoint: EndpointId) -> IndexStats:
        blocks = self._endpoints[endpoint].blocks
        return IndexStats(
            device_blocks=blocks.claims[CacheTier.DEVICE],
            cpu_blocks=blocks.claims[CacheTier.CPU],
            waiting_blocks=blocks.waiting,
            forgotten_waiting_blocks=blocks.forgotten_waiting,
            block_size_tokens=blocks.block_size_tokens,
        )

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
        slots = [blocks.slot for blocks in [*live, *self._cleared]] + self._slots.free
        require(sorted(slots) == list(range(self._slots.count)), "slots are off")


def _are_plain(event: BlockStored) -> bool:
    """Whether no extra key of the event goes into a block (an adapter or a salt goes into the root)."""
    extras = event.extra_keys or ()
    if extras.count(None) == len(extras):
        return True
    encoded = _encode_extras(event)
    return len(encoded) == len(event.hashes) and not any(encoded)


def _encode_extras(event: BlockStored) -> list[bytes]:
    if event.extra_keys is None:
        return [b""] * len(event.hashes)
    encoded: list[bytes] = []
    for index, keys in enumerate(event.extra_keys):
        first = index == 0 and event.parent is None
        _, rest = split_extra_keys(keys, event.lora_name, first)
        raw = encode_extra_keys(rest)
        if raw is None:
            break
        encoded.append(raw)
    return encoded
