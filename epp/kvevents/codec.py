"""Payloads of KV-event messages -> `epp.core.events`. Pure; the rule of what the wire form means.

Payload: msgpack `[ts, events, data_parallel_rank, ...]`; an event is a map with a `type` (vLLM 0.32) or a
positional list that starts with it (older engines), also mixed in one batch (case S-C02). Unknown fields
are ignored, unknown event types and tiers counted.

Whatever bytes come in, the only exception is `CodecError`, and memory stays in proportion to the
message. The rank in the payload is never used: the connection says who sent it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import msgspec
from xxhash import xxh3_64_intdigest

from engine_plugin import wire
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from epp.core.types import CacheTier, EngineBlockHash
from epp.kvevents.event_fields import (
    BAD_BYTES,
    MAX_BATCH_BLOCKS,
    MAX_HASH_BYTES,
    MAX_PAYLOAD_BYTES,
    NULL,
    RemovedFields,
    StoredFields,
    Wired,
    decode_any_batch,
    decode_list,
    decode_list_batch,
    decode_list_tag,
    decode_map,
    decode_map_batch,
    decode_map_tag,
)
from epp.kvevents.extra_keys import are_nulls, build_extra_keys, count_entries, count_keys
from epp.kvevents.framing import CodecError

MAX_BATCH_EXTRA_KEYS: Final = 262_144

_WITH_BLOCKS = (StoredFields, RemovedFields)
_Counted = TypeVar("_Counted")
_TIERS = {None: CacheTier.DEVICE, wire.MEDIUM_DEVICE: CacheTier.DEVICE, wire.MEDIUM_CPU: CacheTier.CPU}
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


# --- payload ------------------------------------------------------------------------------------


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload.

    Raises:
        CodecError: it is no batch, an event of a known type has fields of wrong types, or it names
            too many blocks. The whole batch counts as lost then: what it removed is unknown.
    """
    check_size(payload)
    digest = xxh3_64_intdigest(payload)
    wired = _decode_at_once(payload)
    if wired is None:  # mixed or unknown events, or worse: look at one event after the other
        wired = [decode_event(bytes(raw), at) for at, raw in enumerate(_raw_events(payload))]
    check_work(wired)
    decoded = [build_event(w, at) for at, w in enumerate(wired)]
    unknown = decoded.count(None)
    events = tuple([event for event in decoded if event is not None]) if unknown else tuple(decoded)
    return EventBatch(cast("tuple[Event, ...]", events), unknown, digest)


def check_size(payload: bytes) -> None:
    """Raises CodecError for a payload over the limit."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecError("size", f"payload of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")


def check_work(wired: Sequence[Wired | None], blocks: int = 0, entries: int = 0) -> None:
    """Raises CodecError for a batch that would hold up the loop: it is applied in one go.

    `blocks` and `entries` (of extra keys) are already in the batch. Nothing is built of extra keys
    that are too many.
    """
    extras: list[bytes] = []
    for event in wired:
        if not isinstance(event, _WITH_BLOCKS):
            continue
        count = len(event.block_hashes)
        blocks += count
        if not isinstance(event, StoredFields) or event.extra_keys is NULL:
            continue
        if are_nulls(event.extra_keys, count):
            entries += count
        else:
            encoded = bytes(event.extra_keys)
            count, are_keys = _count(count_entries, encoded)
            entries += count
            if are_keys:
                extras.append(encoded)
    if max(blocks, entries) > MAX_BATCH_BLOCKS:
        raise CodecError("size", f"batch of {max(blocks, entries)} blocks, limit {MAX_BATCH_BLOCKS}")
    extra_keys = 0
    for encoded in extras:
        extra_keys += _count(lambda raw: count_keys(raw, MAX_BATCH_EXTRA_KEYS), encoded)
        if extra_keys > MAX_BATCH_EXTRA_KEYS:
            raise CodecError("size", f"batch of {extra_keys} extra keys, limit {MAX_BATCH_EXTRA_KEYS}")


def _count(count: Callable[[bytes], _Counted], extra_keys: bytes) -> _Counted:
    try:
        return count(extra_keys)
    except ValueError as error:
        raise CodecError("event", str(error)) from None


def _decode_at_once(payload: bytes) -> Sequence[Wired | None] | None:
    for decode in (decode_map_batch, decode_list_batch):
        try:
            return decode(payload).events
        except BAD_BYTES:
            continue
    return None


def _raw_events(payload: bytes) -> list[msgspec.Raw]:
    try:
        return decode_any_batch(payload).events
    except BAD_BYTES as error:
        raise CodecError("payload", type(error).__name__) from None


def decode_event(raw: bytes, position: int) -> Wired | None:
    """The fields of one event; None for a type that we do not know.

    Raises:
        CodecError: a field of a known type is missing or wrong.
    """
    first = raw[0]
    is_list = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
    try:
        wired: Wired = decode_list(raw) if is_list else decode_map(raw)
    except BAD_BYTES as error:
        if _has_unknown_type(raw, is_list):
            return None
        raise CodecError("event", f"event {position}: {type(error).__name__}") from None
    return wired


def _has_unknown_type(raw: bytes, is_list: bool) -> bool:
    try:
        tag = decode_list_tag(raw) if is_list else decode_map_tag(raw)
    except BAD_BYTES:
        return False
    return tag.type not in _KNOWN_TYPES


def build_event(wired: Wired | None, position: int) -> Event | None:
    """One event; None for a type or tier that we do not know.

    Raises:
        CodecError: a number is out of its range.
    """
    if isinstance(wired, StoredFields):
        return _stored(wired, position)
    if isinstance(wired, RemovedFields):
        tier = _TIERS.get(wired.medium)
        if tier is None:
            return None
        return BlockRemoved(tier, _names(wired.block_hashes, position), wired.group_idx)
    return None if wired is None else AllBlocksCleared()


def _stored(wired: StoredFields, position: int) -> BlockStored | None:
    tier = _TIERS.get(wired.medium)
    if tier is None:
        return None
    parent = wired.parent_block_hash
    hashes = wired.block_hashes
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    if wired.extra_keys is not NULL:
        plain = are_nulls(wired.extra_keys, len(hashes))
        extra_keys = (None,) * len(hashes) if plain else build_extra_keys(wired.extra_keys)
    return BlockStored(
        tier,
        _names(hashes, position),
        None if parent is None else _name(parent, position),
        _tokens(wired.token_ids, position),
        wired.block_size,
        _adapter(wired),
        extra_keys,
        extra_keys is not None,
        _group_kind(wired),
        wired.group_idx,
        wired.kv_cache_spec_sliding_window,
    )


def _tokens(token_ids: list[int] | None, position: int) -> Sequence[int] | None:
    """Packed for the hasher; None where the event carries none (offload tiers)."""
    if not token_ids:
        return None
    try:
        packed = array("I")
        packed.fromlist(token_ids)
        return packed
    except OverflowError:
        raise CodecError("event", f"event {position}: a token id is not an unsigned 32-bit integer") from None


def _adapter(wired: StoredFields) -> str | None:
    """An adapter known by number only gets a name that no request has: never a base-model block."""
    if wired.lora_name is None and wired.lora_id is not None:
        return f"\0lora_id={wired.lora_id}"
    return wired.lora_name


def _group_kind(wired: StoredFields) -> str:
    """Older engines name no kind and have one group, number 0 or none."""
    if wired.kv_cache_spec_kind is not None:
        return wired.kv_cache_spec_kind
    return "unknown" if wired.group_idx else "full_attention"


def _names(hashes: list[int | bytes], position: int) -> tuple[EngineBlockHash, ...]:
    try:
        array("Q", cast("list[int]", hashes))  # tells the usual form cheaply
    except (TypeError, OverflowError):
        return tuple([_name(value, position) for value in hashes])
    return cast("tuple[EngineBlockHash, ...]", tuple(hashes))


def _name(value: int | bytes, position: int) -> EngineBlockHash:
    """The engine's hash as 64 bits: of bytes the last eight, as vLLM itself shortens them."""
    if isinstance(value, int):
        if value < 0:
            value += 1 << 64  # signed form of the same 64 bits
        return EngineBlockHash(value)
    if not 0 < len(value) <= MAX_HASH_BYTES:
        raise CodecError("event", f"event {position}: block hash of {len(value)} bytes")
    return EngineBlockHash(int.from_bytes(value[-8:], "big"))
