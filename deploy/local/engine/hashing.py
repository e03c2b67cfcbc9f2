"""Names of KV blocks: a chained 32-byte hash of tokens and extra keys, rooted in the hash seed.

As in vLLM: a name covers the whole prefix; `cache_salt` enters block 0 only, the LoRA name every
block; two engines share blocks only with equal seed, algorithm and block size. Events publish the low 64 bits
as an integer, the peer-to-peer channel the whole hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine_plugin.salt import published_salt

ExtraKeys = tuple[str, ...] | None


def _blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


ALGORITHMS: Final[dict[str, Callable[[bytes], bytes]]] = {"sha256": _sha256, "blake2b": _blake2b}


def _tagged(kind: bytes, key: str | None) -> bytes:
    """An extra key so that no other kind, and no other cut of the bytes, reads the same."""
    if not key:
        return b""
    data = key.encode("utf-8", "surrogatepass")
    return kind + len(data).to_bytes(4, "little") + data


def event_hash(name: bytes) -> int:
    """The form of a block's name in KV events: its low 64 bits."""
    return int.from_bytes(name[-8:], "big")


@dataclass(frozen=True, slots=True)
class Block:
    """A full block: its name and everything an event says of it."""

    name: bytes
    parent: bytes | None  # None: first block of its prompt
    index: int  # position in the prompt, in blocks
    tokens: tuple[int, ...]
    extra_keys: ExtraKeys
    lora_name: str | None


class BlockHasher:
    """Splits token sequences into full blocks and names them."""

    def __init__(self, *, block_size: int, seed: str, algorithm: str, salt_key: bytes | None = None) -> None:
        """`salt_key`: salts stand in events as keyed digests; None: in clear, as stock engines have it."""
        if algorithm not in ALGORITHMS:
            raise ValueError(f"hash algorithm {algorithm!r}: choose from {sorted(ALGORITHMS)}")
        self.block_size = block_size
        self._digest = ALGORITHMS[algorithm]
        self._salt_key = salt_key
        self._root = self._digest(b"kvpull-root\0" + seed.encode())

    def extend(
        self, chain: list[Block], tokens: Sequence[int], *, salt: str | None, lora_name: str | None
    ) -> None:
        """Append to `chain` every full block of `tokens` that it does not have yet."""
        size = self.block_size
        while (len(chain) + 1) * size <= len(tokens):
            start = len(chain) * size
            parent = chain[-1].name if chain else None
            block_salt = None if chain else salt
            keys = tuple(key for key in (lora_name, self._told(block_salt)) if key)
            block_tokens = tuple(tokens[start : start + size])
            extra = _tagged(b"lora", lora_name) + _tagged(b"salt", block_salt)
            name = self._digest((parent or self._root) + array("I", block_tokens).tobytes() + extra)
            chain.append(Block(name, parent, len(chain), block_tokens, keys or None, lora_name))

    def _told(self, salt: str | None) -> str | None:
        """What an event says of a salt."""
        return published_salt(self._salt_key, salt) if salt and self._salt_key else salt
