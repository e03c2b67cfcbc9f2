"""Engine-neutral cache events: what an engine said about its own cache, already decoded.

`epp.kvevents.codec` makes these from wire frames; nothing in the core knows msgpack or ZMQ.
Semantics: vLLM 0.32 kv_events. What is made for each event is a msgspec struct: to make a frozen dataclass of
as many fields takes a twentieth of the time of a whole store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from epp.core.types import CacheTier, EngineBlockHash

# group kinds whose presence proves a prefix; anything else makes no claim (counted)
FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
# kinds whose groups need only the blocks of a window (`group_window_tokens`) before the end of a prefix
SLIDING_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


class BlockStored(Struct, frozen=True, gc=False):
    """`hashes` now live in `tier`, a chain whose first block follows `parent` (None: block 0).

    `token_ids` is None where the event carries no tokens (token-less CPU-tier stores): then the
    hashes are resolved by what the same sender said before. `extra_keys`, where present, has one
    entry a block (None or a tuple); `has_extra_keys` is False where the event cannot tell.
    """

    tier: CacheTier
    hashes: tuple[EngineBlockHash, ...]
    parent: EngineBlockHash | None
    token_ids: Sequence[int] | None
    block_size_tokens: int
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    has_extra_keys: bool = False
    group_kind: str = "full_attention"
    group_idx: int | None = None
    group_window_tokens: int | None = None  # of a sliding window; None: not told


class BlockRemoved(Struct, frozen=True, gc=False):
    """`hashes` are gone from `tier`. Removals name no group kind, only the group's number."""

    tier: CacheTier
    hashes: tuple[EngineBlockHash, ...]
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, gc=False):
    """Every tier of the sending rank is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


# what CPython takes: an event with its fields, a name or a key in a tuple, a token in an array
EVENT_BYTES, NAME_BYTES, KEY_BYTES, TOKEN_BYTES = 256, 40, 64, 4


def event_bytes(event: Event) -> int:
    """About what an event takes in memory."""
    if isinstance(event, AllBlocksCleared):
        return EVENT_BYTES
    taken = EVENT_BYTES + NAME_BYTES * len(event.hashes)
    if isinstance(event, BlockStored):
        taken += TOKEN_BYTES * len(event.token_ids or ()) + len(event.lora_name or "")
        if event.extra_keys is not None:
            taken += 8 * len(event.extra_keys)
            taken += sum([KEY_BYTES + sum(map(_key_bytes, keys)) for keys in event.extra_keys if keys])
    return taken


def _key_bytes(key: object) -> int:
    if isinstance(key, list | tuple):
        return KEY_BYTES + sum(map(_key_bytes, key))
    return KEY_BYTES + (len(key) if isinstance(key, str | bytes) else 0)


class Batch(Protocol):
    """One message of an engine. `unknown_events` counts parts of it that we do not understand;
    `digest` identifies the payload (engine-restart detection)."""

    @property
    def events(self) -> tuple[Event, ...]: ...

    @property
    def event_count(self) -> int:
        """`len(events)`, without making them."""
        ...

    @property
    def unknown_events(self) -> int: ...

    @property
    def digest(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory, never much less: for whoever keeps batches."""
        ...


class EventBatch(Struct, frozen=True, gc=False):
    """The plain form of a `Batch`."""

    events: tuple[Event, ...]
    unknown_events: int = 0
    digest: int = 0

    @property
    def event_count(self) -> int:
        return len(self.events)

    @property
    def size_bytes(self) -> int:
        return sum(map(event_bytes, self.events))


class Applied(Struct, frozen=True, gc=False):
    """The batch is in the index (or was a harmless duplicate): facts for the shell's counters."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # parent unknown: held back, no claim until the chain is complete
    unresolved_blocks: int = 0  # token-less stores of hashes never seen: dropped
    skipped_blocks: int = 0  # extra keys or numbers that prove no prefix, or no room for the block
    clears: int = 0  # times the engine said that everything is gone
    duplicate: bool = False
    refused_blocks: int = 0  # the index is at its byte bound
    windowed_blocks: int = 0  # stores of groups that limit the prefix (`window_groups`)
    unsupported_blocks: int = 0  # stores of groups without a rule: the endpoint makes no claim


def sum_applied(parts: Sequence[Applied]) -> Applied:
    """Of batches applied one after the other."""
    counts = [name for name in Applied.__struct_fields__ if name != "duplicate"]
    return Applied(**{name: sum([getattr(part, name) for part in parts]) for name in counts})


@dataclass(frozen=True, slots=True)
class Buffered:
    """The batch waits for the end of a replay; `batches` wait in all."""

    batches: int


@dataclass(frozen=True, slots=True)
class ReplayNeeded:
    """The stream has a hole: ask the engine's replay socket for everything from `from_seq` on.

    The replay starts one batch before the hole where we can tell that batch again (a restarted
    engine answers with another one). Batches of any older replay must not be passed on from now on.
    `cleared` says that what we held of the endpoint was dropped (restart, failed replay).
    """

    from_seq: int
    cleared: bool
    # "first_contact" | "reconnect" | "gap" | "undecodable" | "restart" | "replay_failed" | "snapshot"
    # | "snapshot_refused"
    reason: str


BatchResult = Applied | Buffered | ReplayNeeded
