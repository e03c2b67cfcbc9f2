"""Made-up tokens, and the engine's names of their blocks. Texts share a prefix where their tokens do.

Tokens are uint32 arrays, because that is what the index reads fastest; nothing here is a real prompt.
"""

from __future__ import annotations

import random
import struct
from array import array
from dataclasses import dataclass

from epp.core.hashing import BlockHasher
from epp.core.types import BlockKey, EngineBlockHash

_ENGINE_HASHER = BlockHasher(b"simulated engine")
_ROOT = BlockKey(1)


def random_tokens(rng: random.Random, count: int) -> array[int]:
    """`count` ids that as good as never make an equal block twice."""
    found = array("I")
    found.frombytes(rng.randbytes(4 * count))
    return found


@dataclass(frozen=True, slots=True)
class Content:
    """Tokens with the names of their whole blocks, chained as an engine chains them."""

    tokens: array[int]
    hashes: tuple[EngineBlockHash, ...]
    names: tuple[bytes, ...]  # the same, as the cache's keys
    block_tokens: int

    @classmethod
    def of(cls, tokens: array[int], block_tokens: int) -> Content:
        hashes = _ENGINE_HASHER.chain(_ROOT, tokens.tobytes(), block_tokens)
        names = struct.unpack("8s" * len(hashes), struct.pack(f"{len(hashes)}Q", *hashes))
        return cls(tokens, tuple(map(EngineBlockHash, hashes)), names, block_tokens)


def hashes_of(names: tuple[bytes, ...]) -> tuple[EngineBlockHash, ...]:
    """Back from the cache's keys to what events say."""
    return tuple(map(EngineBlockHash, struct.unpack(f"{len(names)}Q", b"".join(names))))
