"""The fields of a KV event as msgspec reads them, and the limits that a message has to keep.

Types only: what a field means is `codec`'s affair. Extra keys stay raw bytes here (`extra_keys`), because
building them before they are counted would let one message hold up the loop for seconds.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

# 1M tokens in blocks of 16 are 6 MiB; a message is decoded and applied in one go, so more is no help
MAX_PAYLOAD_BYTES: Final = 8 << 20
MAX_EVENTS: Final = 65_536
MAX_BLOCKS: Final = 262_144  # in one event
MAX_BATCH_BLOCKS: Final = 131_072  # in all events of one batch; also entries of extra keys
MAX_TOKENS: Final = 4 << 20  # in one event
MAX_BLOCK_SIZE_TOKENS: Final = 65_536
MAX_HASH_BYTES: Final = 64

NULL: Final = msgspec.Raw(b"\xc0")

Hash = int | bytes
Hashes = Annotated[list[Hash], msgspec.Meta(max_length=MAX_BLOCKS)]
_Tokens = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE_TOKENS)]
_Text = Annotated[str, msgspec.Meta(max_length=1_024)]


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class StoredFields(msgspec.Struct, gc=False):
    block_hashes: Hashes
    parent_block_hash: Hash | None
    token_ids: _Tokens | None
    block_size: _Size
    lora_id: int | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: msgspec.Raw = NULL
    group_idx: int | None = None
    kv_cache_spec_kind: _Text | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedFields(msgspec.Struct, gc=False):
    block_hashes: Hashes
    medium: _Text | None = None
    group_idx: int | None = None


class MapTag(msgspec.Struct, gc=False):
    type: _Text


class ListTag(msgspec.Struct, array_like=True, gc=False):
    type: _Text


# the same fields in the same order, after the tag, for engines that send positional lists
class StoredMap(StoredFields, tag_field="type", tag="BlockStored", gc=False):
    pass


class StoredList(StoredFields, array_like=True, tag="BlockStored", gc=False):
    pass


class RemovedMap(RemovedFields, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class RemovedList(RemovedFields, array_like=True, tag="BlockRemoved", gc=False):
    pass


class ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class ClearedList(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


Wired = StoredFields | RemovedFields | ClearedMap | ClearedList


class MapBatch(msgspec.Struct, array_like=True, gc=False):
    """What a current engine sends when nothing in it is new to us: decoded in one go."""

    ts: float
    events: Annotated[list[StoredMap | RemovedMap | ClearedMap], msgspec.Meta(max_length=MAX_EVENTS)]


class ListBatch(msgspec.Struct, array_like=True, gc=False):
    """The same of an engine that sends positional events."""

    ts: float
    events: Annotated[list[StoredList | RemovedList | ClearedList], msgspec.Meta(max_length=MAX_EVENTS)]


decode_any_batch = msgspec.msgpack.Decoder(Batch).decode
decode_map_batch = msgspec.msgpack.Decoder(MapBatch).decode
decode_list_batch = msgspec.msgpack.Decoder(ListBatch).decode
decode_map = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap).decode
decode_list = msgspec.msgpack.Decoder(StoredList | RemovedList | ClearedList).decode
decode_map_tag = msgspec.msgpack.Decoder(MapTag).decode
decode_list_tag = msgspec.msgpack.Decoder(ListTag).decode
decode_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
# an extra key is decoded untyped; by then it is known to be small, or flat and complete
decode_key = msgspec.msgpack.Decoder().decode
# what msgspec raises for bytes that are not what they should be
BAD_BYTES = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
