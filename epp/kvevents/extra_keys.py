"""Extra keys of an event: null, or a list with an entry a block, which is null or a list of keys.

They are counted from the headers of their lists before anything is built: an object a key, or an item
of a key, for a message full of them would hold up the loop for seconds. Which keys mean what is the
core's affair; one that is neither text, bytes, a whole number nor a flat list of these (an engine's picture
and its offset) stands as None, a type that no chain goes past.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from epp.kvevents.event_fields import BAD_BYTES, MAX_BLOCKS, decode_key, decode_raws

MAX_EXTRA_KEYS: Final = 256  # in one block
_MAX_QUICK: Final = 1_024
_NULL: Final = 0xC0
_UNREADABLE_KEY = None
# first bytes of text, bytes and whole numbers
_SCALARS: Final = (
    frozenset(range(0x100))
    - {*range(0x80, 0xA0), 0xC0, 0xC1, 0xC2, 0xC3}
    - {*range(0xC7, 0xCC), *range(0xD4, 0xD9), *range(0xDC, 0xE0)}
)


def _array(raw: bytes) -> tuple[int, int] | None:
    """Items of an array, and where they begin. None: it is no array."""
    first = raw[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(raw[1:3], "big"), 3
    return (int.from_bytes(raw[1:5], "big"), 5) if first == 0xDD else None


@lru_cache(maxsize=256)
def _encoded_nulls(count: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode([None] * count))


def are_nulls(extra_keys: msgspec.Raw, count: int) -> bool:
    """Whether it surely is a list of `count` nulls: what plain text has. A quick look, for lists that are
    not too long: False says nothing."""
    return count <= _MAX_QUICK and extra_keys == _encoded_nulls(count)


def count_entries(encoded: bytes) -> tuple[int, bool]:
    """Entries of an event's extra keys (0 for null), and whether there may be a key among them.

    Raises:
        ValueError: it is no list, or an absurd one.
    """
    array = _array(encoded)
    if array is None and encoded[0] == _NULL:
        return 0, False
    if array is None or array[0] > MAX_BLOCKS:
        raise ValueError("extra keys are no list of a fair length")
    return array[0], not _is_all_null(encoded)


def count_keys(encoded: bytes, most: int) -> int:
    """Keys of all blocks of an event, and items of those that are lists. Work in proportion to its
    entries and to `most`: of more than that, only that they are more is said.

    Raises:
        ValueError: an entry is neither null nor a list, or an absurd one.
    """
    keys = 0
    for entry in decode_raws(encoded):
        head = memoryview(entry)[:5].tobytes()
        array = _array(head)
        if array is not None and array[0] <= MAX_EXTRA_KEYS:
            keys += array[0]
            if array[0] and keys <= most:
                keys += _count_items(bytes(entry))
        elif array is not None or head[0] != _NULL:
            raise ValueError("extra keys of a block are no list of a fair length")
        if keys > most:
            break
    return keys


def _count_items(entry: bytes) -> int:
    arrays = [_array(memoryview(key)[:5].tobytes()) for key in decode_raws(entry)]
    return sum([array[0] for array in arrays if array is not None])


def _is_all_null(encoded: bytes) -> bool:
    """A list of nulls: what plain text has."""
    count, start = _array(encoded) or (0, 0)
    return len(encoded) == start + count == start + encoded.count(_NULL, start)


def build_extra_keys(raw: msgspec.Raw) -> tuple[tuple[object, ...] | None, ...] | None:
    """Per block a tuple of keys or None; None for null. For lists that `count_keys` has accepted."""
    encoded = bytes(raw)
    array = _array(encoded)
    if array is None:
        return None
    if _is_all_null(encoded):
        return (None,) * array[0]
    return tuple([_block_keys(entry) for entry in decode_raws(encoded)])


def _block_keys(entry: msgspec.Raw) -> tuple[object, ...] | None:
    encoded = bytes(entry)
    if encoded[0] == _NULL:
        return None
    return tuple([_key(bytes(raw)) for raw in decode_raws(encoded)])


def _key(raw: bytes) -> object:
    """Anything but the types that the core knows is not worth building, however large it may be."""
    try:
        scalars = [raw] if _array(raw) is None else decode_raws(raw)
        if not all([memoryview(scalar)[0] in _SCALARS for scalar in scalars]):
            return _UNREADABLE_KEY
        return decode_key(raw)
    except BAD_BYTES:
        return _UNREADABLE_KEY
