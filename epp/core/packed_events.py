"""A batch of events without an object per token or block: what the compiled decoder makes of a message.

The usual events are fixed records with spans of two arrays (names, token ids), see `_packed_events.h`;
the compiled index applies them from there. Rare events are ordinary ones, in their place. `events`
shows all of them in the ordinary form, which any index takes; both forms say the same.

It must not know the wire form, nor apply anything.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final, NamedTuple, cast

from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, event_bytes
from epp.core.types import CacheTier, EngineBlockHash

RECORD: Final = struct.Struct("=Q12I")
OTHER, STORED, REMOVED, CLEARED = range(4)  # kinds of a record
CPU, HAS_PARENT, HAS_EXTRA = 1, 2, 4  # flags of a record
GROUP_SHIFT: Final = 4
# kinds of groups, by their number in the flags; those of full attention first
GROUP_KINDS: Final = (
    "full_attention",
    "mla_attention",
    "sink_full_attention",
    "sliding_window",
    "sliding_window_mla",
)


class PackedBatch(NamedTuple):
    """One message of an engine, as `events.Batch` describes it."""

    table: bytes  # records
    names: bytes  # uint64, native order
    tokens: bytes  # uint32, native order
    adapters: tuple[str, ...]
    others: tuple[Event | None, ...]  # None: of a type or tier that we do not know
    unknown_events: int
    digest: int

    @property
    def event_count(self) -> int:
        return len(self.table) // RECORD.size - self.unknown_events

    @property
    def size_bytes(self) -> int:
        others = sum([event_bytes(event) for event in self.others if event is not None])
        return len(self.table) + len(self.names) + len(self.tokens) + sum(map(len, self.adapters)) + others

    @property
    def events(self) -> tuple[Event, ...]:
        """In the ordinary form; made anew with every call."""
        found = [self.event(i) for i in range(len(self.table) // RECORD.size)]
        return tuple([event for event in found if event is not None])

    def event(self, number: int) -> Event | None:
        """The record `number` in the ordinary form; None for one that we do not know."""
        record: tuple[int, ...] = RECORD.unpack_from(self.table, number * RECORD.size)
        parent, kind, flags, first_name, names, first_token, tokens, size, extra_count = record[:9]
        lora, group, window, _ = record[9:]
        if kind == OTHER:
            return self.others[first_name]
        if kind == CLEARED:
            return AllBlocksCleared()
        tier = CacheTier.CPU if flags & CPU else CacheTier.DEVICE
        hashes = cast("tuple[EngineBlockHash, ...]", tuple(_part("Q", self.names, first_name, names)))
        group_idx: int | None = group - 1 if group else None
        if kind == REMOVED:
            return BlockRemoved(tier, hashes, group_idx)
        has_extra = bool(flags & HAS_EXTRA)
        return BlockStored(
            tier=tier,
            hashes=hashes,
            parent=EngineBlockHash(parent) if flags & HAS_PARENT else None,
            token_ids=_part("I", self.tokens, first_token, tokens) if tokens else None,
            block_size_tokens=size,
            lora_name=self.adapters[lora - 1] if lora else None,
            extra_keys=(None,) * extra_count if has_extra else None,
            has_extra_keys=has_extra,
            group_kind=GROUP_KINDS[flags >> GROUP_SHIFT],
            group_idx=group_idx,
            group_window_tokens=window or None,
        )


def _part(kind: str, raw: bytes, first: int, count: int) -> array[int]:
    part = array(kind)
    part.frombytes(raw[first * part.itemsize : (first + count) * part.itemsize])
    return part
