"""What a store event proves about the content of its blocks. Pure functions on one event."""

from __future__ import annotations

from epp.core.events import BlockStored
from epp.core.hashing import TOKEN_BYTES, InvalidTokens, encode_extra_keys, pack_tokens, split_extra_keys
from epp.core.types import CacheTier


def proves_content(event: BlockStored) -> bool:
    """False: go by the names only. CPU tokens without extra keys cannot tell salted from unsalted."""
    return event.token_ids is not None and (event.tier is not CacheTier.CPU or event.has_extra_keys)


def contents_of(event: BlockStored) -> list[bytes] | None:
    """Bytes to hash for each block (its tokens, then its extra keys), up to the first extra key of
    unknown type. None: the event's numbers do not fit together."""
    size, count = event.block_size_tokens, len(event.hashes)
    tokens = event.token_ids
    if tokens is None or size <= 0 or not count or len(tokens) != size * count:
        return None
    if event.extra_keys is not None and len(event.extra_keys) != count:
        return None
    try:
        packed = pack_tokens(tokens)
    except InvalidTokens:
        return None
    width = size * TOKEN_BYTES
    return [packed[i * width : (i + 1) * width] + extra for i, extra in enumerate(encode_extras(event))]


def encode_extras(event: BlockStored) -> list[bytes]:
    """Bytes of each block's extra keys, up to the first of unknown type."""
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


def are_plain(event: BlockStored) -> bool:
    """Whether no extra key of the event goes into a block (an adapter or a salt goes into the root)."""
    extras = event.extra_keys or ()
    if extras.count(None) == len(extras):
        return True
    encoded = encode_extras(event)
    return len(encoded) == len(event.hashes) and not any(encoded)
