"""Block keys: our own name of a block of tokens, computed the same way from events and from prompts.

A key is a chained 64-bit xxh3 over the block's token ids (uint32, little endian), seeded with the
key of the block before it and rooted in a 128-bit index seed, the model, the LoRA adapter and the
cache salt. The seed is secret to the picker, so nobody can prepare prompts that collide; a
collision would cost a recompute on the engine, never a wrong answer.

This module must not know events, endpoints or tiers, and never names a block that it cannot prove:
an extra key of an unknown type ends the chain.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from epp.core.types import BlockKey, EngineBlockHash

INDEX_SEED_BYTES = 16
TOKEN_BYTES = 4
MAX_NAME = 2**64 - 1
Family: TypeAlias = tuple[str, int]  # model and block size: endpoints whose keys can be compared
PromptKeys: TypeAlias = "array[int]"  # typecode Q: a prompt's block keys, 8 bytes each
_MAX_EXTRA_DEPTH = 4
_MAX_KEPT_CUT = 64  # blocks: an event's chain, not a prompt's
_LITTLE_ENDIAN = sys.byteorder == "little"


class InvalidTokens(ValueError):
    """Token ids that are no list of unsigned 32-bit integers. The message never shows them."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as uint32 little endian. Lists, `array('I')` and uint32 buffers are fast.

    Raises:
        InvalidTokens: an id is not an integer in [0, 2^32).
    """
    if type(token_ids) is array and token_ids.typecode == "I" and _LITTLE_ENDIAN:
        return token_ids.tobytes()
    if isinstance(token_ids, array | memoryview):
        view = memoryview(token_ids)
        if view.format == "I" and view.contiguous and _LITTLE_ENDIAN:
            return view.tobytes()
    if isinstance(token_ids, bytes | bytearray | str):
        raise InvalidTokens(f"token ids are {type(token_ids).__name__}, not integers")
    try:
        packed = _packed_list(token_ids) if type(token_ids) is list else array("I", token_ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidTokens("a token id is not an unsigned 32-bit integer") from error
    if not _LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def _packed_list(token_ids: list[int]) -> array[int]:
    packed = array("I")
    packed.fromlist(token_ids)  # a tenth cheaper than the constructor
    return packed


def split_extra_keys(
    keys: tuple[object, ...] | None, lora_name: str | None, first_block: bool
) -> tuple[str | None, tuple[object, ...]]:
    """Take an engine's extra keys of one block apart: (cache salt, what is left to hash).

    vLLM 0.32 writes (LoRA name, multimodal keys..., cache salt) and the salt only in block 0. The
    adapter is already in the root, so its name is dropped here (else it would be read as a picture,
    case S-C11).
    """
    rest = keys or ()
    if lora_name is not None and rest and rest[0] == lora_name:
        rest = rest[1:]
    if first_block and rest and isinstance(rest[-1], str):
        return rest[-1], rest[:-1]
    return None, rest


def encode_extra_keys(keys: tuple[object, ...]) -> bytes | None:
    """Unambiguous bytes of a block's extra keys; empty for none; None: a type we do not know."""
    if not keys:
        return b""
    parts = [_encode_extra(key, 0) for key in keys]
    return None if None in parts else b"".join(part for part in parts if part is not None)


def _encode_extra(key: object, depth: int) -> bytes | None:
    if isinstance(key, str):
        raw = key.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(raw) + raw
    if isinstance(key, bytes):
        return b"b%d:" % len(key) + key
    if isinstance(key, int) and not isinstance(key, bool):
        return b"i%d;" % key
    if isinstance(key, tuple | list) and depth < _MAX_EXTRA_DEPTH:
        parts = [_encode_extra(item, depth + 1) for item in key]
        if None not in parts:
            return b"(" + b"".join(part for part in parts if part is not None) + b")"
    return None


@lru_cache(maxsize=256)
def _cut(block_bytes: int, count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return struct.Struct(f"{block_bytes}s" * count).unpack_from


class BlockHasher:
    """Chains block keys under one 128-bit index seed. Stateless apart from the seed."""

    scheme = "xxh3-chain-1"  # name of this way to make keys: keys of two schemes never meet

    def __init__(self, index_seed: bytes) -> None:
        """`index_seed`: 16 bytes; random in the first replica, injected by tests and simulator.

        Raises:
            ValueError: the seed has another length.
        """
        if len(index_seed) != INDEX_SEED_BYTES:
            raise ValueError(f"index seed has {len(index_seed)} bytes, needs {INDEX_SEED_BYTES}")
        self._seed = index_seed

    def name(self, engine_hash: EngineBlockHash) -> EngineBlockHash:
        """An engine's name of a block as 64 bits: itself where it fits, a keyed hash of it where not."""
        if 0 <= engine_hash <= MAX_NAME:
            return engine_hash
        raw = engine_hash.to_bytes(engine_hash.bit_length() // 8 + 1, "little", signed=True)
        return EngineBlockHash(xxh3_64_intdigest(self._seed + raw))

    def names(self, engine_hashes: tuple[EngineBlockHash, ...]) -> tuple[EngineBlockHash, ...]:
        """`name` of each; the tuple itself where all fit, as engines' hashes do."""
        try:
            array("Q", engine_hashes)  # the cheapest look at all of them
        except OverflowError:
            return tuple(map(self.name, engine_hashes))
        return engine_hashes

    def root(self, model: str, lora_name: str | None, cache_salt: str | None) -> BlockKey:
        """What block 0 is chained to. An absent part and an empty one differ."""
        parts = [self._seed]
        for text in (model, lora_name, cache_salt):
            if text is None:
                parts.append(b"n")
            else:
                raw = text.encode("utf-8", "surrogatepass")
                parts.append(b"s%d:" % len(raw) + raw)
        return BlockKey(xxh3_64_intdigest(b"".join(parts)))

    def next_key(self, parent: BlockKey, block: bytes) -> BlockKey:
        """Key of one block: its packed tokens followed by its encoded extra keys."""
        return BlockKey(xxh3_64_intdigest(block, parent))

    def chain(self, parent: BlockKey, packed: bytes, block_size_tokens: int) -> list[BlockKey]:
        """Keys of all whole blocks of `packed` that follow `parent`; a last part block has none."""
        block_bytes = block_size_tokens * TOKEN_BYTES
        count = len(packed) // block_bytes
        key: int = parent
        digest = xxh3_64_intdigest
        # one unpack of n equal strings is the cheapest way to cut bytes in pure Python
        if count <= _MAX_KEPT_CUT:
            blocks = _cut(block_bytes, count)(packed)
        else:
            blocks = struct.unpack_from(f"{block_bytes}s" * count, packed)
        # NewType call costs as much as the hash
        return [key := digest(block, key) for block in blocks]  # type: ignore[misc]
