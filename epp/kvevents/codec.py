"""KV-event messages of an engine -> `epp.core.events`. Pure; the only place that knows the wire form.

Messages: live `[topic, sequence, payload]`; replayed ones also without the topic (case S-C03) and with
an empty delimiter first. Payload: msgpack `[ts, events, data_parallel_rank, ...]`; an event is a map
with a `type` (vLLM 0.32) or a positional list that starts with it (older engines), also mixed in one
batch (case S-C02). Unknown fields are ignored, unknown event types and tiers counted.

Whatever bytes come in, the only exception is `CodecError`, and memory stays in proportion to the
message. The topic and the rank in the payload are never used: the connection says who sent it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from xxhash import xxh3_64_intdigest

from engine_plugin import wire
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from epp.core.types import CacheTier, EngineBlockHash

MAX_PAYLOAD_BYTES: Final = 16 << 20
MAX_EVENTS: Final = 65_536
MAX_BLOCKS: Final = 262_144  # in one event
MAX_BATCH_BLOCKS: Final = 131_072  # in all events of one batch
MAX_TOKENS: Final = 4 << 20  # in one event
MAX_BLOCK_SIZE_TOKENS: Final = 65_536
MAX_EXTRA_KEYS: Final = 256  # in one block
MAX_BATCH_EXTRA_KEYS: Final = 262_144
MAX_HASH_BYTES: Final = 64
SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQUENCE_BYTES

_TIERS = {None: CacheTier.DEVICE, wire.MEDIUM_DEVICE: CacheTier.DEVICE, wire.MEDIUM_CPU: CacheTier.CPU}
_UNREADABLE_KEY = None  # stands for an extra key of a type we do not know: it ends the key chain


class CodecError(ValueError):
    """A message that is no KV-event batch. `reason` is a stable label; the text never shows data."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason  # "frames" | "sequence" | "size" | "payload" | "event"


@dataclass(frozen=True, slots=True)
class Message:
    """A message cut into its parts; `seq` is None for the end marker of a replay."""

    seq: int | None
    payload: bytes


def split_live(frames: Sequence[bytes]) -> Message:
    """Parts of a published message: two frames (no topic) or three.

    Raises:
        CodecError: another number of frames, a sequence that is none, a payload over the limit.
    """
    if not 2 <= len(frames) <= 3:
        raise CodecError("frames", f"{len(frames)} frames instead of topic, sequence, payload")
    message = _split(frames)
    if message.seq is None:
        raise CodecError("sequence", "end marker of a replay in the live stream")
    return message


def split_replayed(frames: Sequence[bytes]) -> Message:
    """Parts of an answer on the replay socket: as a live message, with or without a delimiter.

    Raises:
        CodecError: see `split_live`.
    """
    if not 2 <= len(frames) <= 4:
        raise CodecError("frames", f"{len(frames)} frames in an answer of the replay socket")
    return _split(frames)


def replay_request(from_seq: int) -> list[bytes]:
    """Frames that ask a replay socket for everything from `from_seq` on."""
    return [b"", from_seq.to_bytes(SEQUENCE_BYTES, "big")]


def is_end_of_replay(frames: Sequence[bytes]) -> bool:
    """Cheap test for the receiving thread."""
    return len(frames) >= 2 and frames[-2] == END_OF_REPLAY


def _split(frames: Sequence[bytes]) -> Message:
    sequence, payload = frames[-2], frames[-1]
    if len(sequence) != SEQUENCE_BYTES:
        raise CodecError("sequence", f"sequence frame of {len(sequence)} bytes instead of {SEQUENCE_BYTES}")
    if sequence == END_OF_REPLAY:
        return Message(None, b"")
    seq = int.from_bytes(sequence, "big")
    if seq >> 63:
        raise CodecError("sequence", "sequence is negative")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecError("size", f"payload of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
    return Message(seq, payload)


# --- payload ------------------------------------------------------------------------------------

_Hash = int | bytes
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=MAX_BLOCKS)]
_Tokens = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]
_BlockExtra = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EXTRA_KEYS)]
_Extra = Annotated[list[_BlockExtra | None], msgspec.Meta(max_length=MAX_BLOCKS)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE_TOKENS)]
_Text = Annotated[str, msgspec.Meta(max_length=1_024)]


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _StoredFields(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _Tokens | None
    block_size: _Size
    lora_id: int | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: _Extra | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: _Text | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedFields(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    medium: _Text | None = None
    group_idx: int | None = None


class _MapTag(msgspec.Struct, gc=False):
    type: _Text


class _ListTag(msgspec.Struct, array_like=True, gc=False):
    type: _Text


# the same fields in the same order, after the tag, for engines that send positional lists
class _StoredMap(_StoredFields, tag_field="type", tag="BlockStored", gc=False):
    pass


class _StoredList(_StoredFields, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedMap(_RemovedFields, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _RemovedList(_RemovedFields, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _ClearedList(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_Wired = _StoredFields | _RemovedFields | _ClearedMap | _ClearedList


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    """What a current engine sends when nothing in it is new to us: decoded in one go."""

    ts: float
    events: Annotated[list[_StoredMap | _RemovedMap | _ClearedMap], msgspec.Meta(max_length=MAX_EVENTS)]


_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map_batch = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_list = msgspec.msgpack.Decoder(_StoredList | _RemovedList | _ClearedList).decode
_decode_map_tag = msgspec.msgpack.Decoder(_MapTag).decode
_decode_list_tag = msgspec.msgpack.Decoder(_ListTag).decode
# an extra key is decoded untyped; by then its bytes are known to be complete, so lengths are real
_decode_key = msgspec.msgpack.Decoder().decode
# what msgspec raises for bytes that are not what they should be
_BAD_BYTES = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload.

    Raises:
        CodecError: it is no batch, an event of a known type has fields of wrong types, or it names
            too many blocks. The whole batch counts as lost then: what it removed is unknown.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecError("size", f"payload of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
    digest = xxh3_64_intdigest(payload)
    try:
        wired: Sequence[_Wired | None] = _decode_map_batch(payload).events
    except _BAD_BYTES:  # positional or unknown events, or worse: look at one event after the other
        wired = [_decode_event(bytes(raw), at) for at, raw in enumerate(_raw_events(payload))]
    _check_work(wired)
    decoded = [None if w is None else _event(w, at) for at, w in enumerate(wired)]
    events = tuple([event for event in decoded if event is not None])
    return EventBatch(events, len(decoded) - len(events), digest)


def _check_work(wired: Sequence[_Wired | None]) -> None:
    """Raises CodecError for a batch that would hold up the loop: it is applied in one go."""
    blocks = extra_keys = 0
    for event in wired:
        if isinstance(event, _StoredFields | _RemovedFields):
            blocks += len(event.block_hashes)
        if isinstance(event, _StoredFields) and event.extra_keys is not None:
            extra_keys += sum([len(keys) for keys in event.extra_keys if keys is not None])
    if blocks > MAX_BATCH_BLOCKS:
        raise CodecError("size", f"batch of {blocks} blocks, limit {MAX_BATCH_BLOCKS}")
    if extra_keys > MAX_BATCH_EXTRA_KEYS:
        raise CodecError("size", f"batch of {extra_keys} extra keys, limit {MAX_BATCH_EXTRA_KEYS}")


def _raw_events(payload: bytes) -> list[msgspec.Raw]:
    try:
        return _decode_batch(payload).events
    except _BAD_BYTES as error:
        raise CodecError("payload", type(error).__name__) from None


def _decode_event(raw: bytes, position: int) -> _Wired | None:
    """One event; None for a type that we do not know."""
    first = raw[0]
    is_list = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
    try:
        wired: _Wired = _decode_list(raw) if is_list else _decode_map(raw)
    except _BAD_BYTES as error:
        if _has_unknown_type(raw, is_list):
            return None
        raise CodecError("event", f"event {position}: {type(error).__name__}") from None
    return wired


def _has_unknown_type(raw: bytes, is_list: bool) -> bool:
    try:
        tag = _decode_list_tag(raw) if is_list else _decode_map_tag(raw)
    except _BAD_BYTES:
        return False
    return tag.type not in _KNOWN_TYPES


def _event(wired: _Wired, position: int) -> Event | None:
    """One event; None for a tier that we do not know."""
    if isinstance(wired, _StoredFields):
        return _stored(wired, position)
    if isinstance(wired, _RemovedFields):
        tier = _TIERS.get(wired.medium)
        if tier is None:
            return None
        return BlockRemoved(tier, _names(wired.block_hashes, position), wired.group_idx)
    return AllBlocksCleared()


def _stored(wired: _StoredFields, position: int) -> BlockStored | None:
    tier = _TIERS.get(wired.medium)
    if tier is None:
        return None
    parent = wired.parent_block_hash
    return BlockStored(
        tier=tier,
        hashes=_names(wired.block_hashes, position),
        parent=None if parent is None else _name(parent, position),
        token_ids=_tokens(wired.token_ids, position),
        block_size_tokens=wired.block_size,
        lora_name=_adapter(wired),
        extra_keys=None if wired.extra_keys is None else tuple(map(_block_extra, wired.extra_keys)),
        has_extra_keys=wired.extra_keys is not None,
        group_kind=_group_kind(wired),
        group_idx=wired.group_idx,
        group_window_tokens=wired.kv_cache_spec_sliding_window,
    )


def _tokens(token_ids: list[int] | None, position: int) -> Sequence[int] | None:
    """Packed for the hasher; None where the event carries none (offload tiers)."""
    if not token_ids:
        return None
    try:
        return array("I", token_ids)
    except OverflowError:
        raise CodecError("event", f"event {position}: a token id is not an unsigned 32-bit integer") from None


def _adapter(wired: _StoredFields) -> str | None:
    """An adapter known by number only gets a name that no request has: never a base-model block."""
    if wired.lora_name is None and wired.lora_id is not None:
        return f"\0lora_id={wired.lora_id}"
    return wired.lora_name


def _group_kind(wired: _StoredFields) -> str:
    """Older engines name no kind and have one group, number 0 or none."""
    if wired.kv_cache_spec_kind is not None:
        return wired.kv_cache_spec_kind
    return "unknown" if wired.group_idx else "full_attention"


def _names(hashes: list[int | bytes], position: int) -> tuple[EngineBlockHash, ...]:
    return tuple([_name(value, position) for value in hashes])


def _name(value: int | bytes, position: int) -> EngineBlockHash:
    """The engine's hash as 64 bits: of bytes the last eight, as vLLM itself shortens them."""
    if isinstance(value, int):
        if value < 0:
            value += 1 << 64  # signed form of the same 64 bits
        return EngineBlockHash(value)
    if not 0 < len(value) <= MAX_HASH_BYTES:
        raise CodecError("event", f"event {position}: block hash of {len(value)} bytes")
    return EngineBlockHash(int.from_bytes(value[-8:], "big"))


def _block_extra(keys: list[msgspec.Raw] | None) -> tuple[object, ...] | None:
    return None if keys is None else tuple([_extra_key(bytes(raw)) for raw in keys])


def _extra_key(raw: bytes) -> object:
    try:
        return _decode_key(raw)
    except _BAD_BYTES:
        return _UNREADABLE_KEY
