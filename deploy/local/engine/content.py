"""What the KV bytes of a token are, and how answers follow from bytes.

Every token's row is a fixed random pattern (one per model) XORed with a 64-bit seed that depends on
all tokens up to it, so content does not depend on hash seed, salt or block size, as in a real
model; a byte of another prefix, another position or an older use of the slot differs. Pure numpy;
the heavy functions release the GIL and are meant for a worker thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_PRIME = 0x9E3779B97F4A7C15 | 1
_MASK = (1 << 64) - 1
_INVERSE = pow(_PRIME, -1, 1 << 64)


def mix(values: Words) -> Words:
    """splitmix64 finaliser: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _powers(base: int, first: int, count: int) -> Words:
    """base**first ... base**(first+count-1) modulo 2**64."""
    steps = np.full(count, base, dtype=np.uint64)
    steps[:1] = pow(base, first, 1 << 64)
    return np.multiply.accumulate(steps, dtype=np.uint64)


class SeedChain:
    """The seeds of one sequence's tokens: a polynomial rolling hash, extended in bulk.

    state after token i = state before * P + mixed(token i); seed i = mixed(state after i).
    """

    def __init__(self) -> None:
        self._state = 0
        self._length = 0
        self._seeds: Words = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the seeds of `tokens`."""
        count = len(tokens)
        if count == 0:
            return
        mixed = mix(np.asarray(tokens, dtype=np.uint64) + np.uint64(_PRIME))
        weighted = np.cumsum(mixed * _powers(_INVERSE, 1, count), dtype=np.uint64)
        states = (weighted + np.uint64(self._state)) * _powers(_PRIME, 1, count)
        self._state = int(states[-1])
        self._reserve(self._length + count)
        self._seeds[self._length : self._length + count] = mix(states)
        self._length += count

    def _reserve(self, length: int) -> None:
        if length > len(self._seeds):
            grown = np.zeros(max(length, 2 * len(self._seeds), 64), dtype=np.uint64)
            grown[: self._length] = self._seeds[: self._length]
            self._seeds = grown

    def slice(self, start: int, stop: int) -> Words:
        """Seeds of tokens `[start, stop)`; a view."""
        return self._seeds[start : min(stop, self._length)]


class Content:
    """Bytes of token rows for one model, `words` 64-bit words a token."""

    def __init__(self, *, model: str, kv_bytes_per_token: int) -> None:
        if kv_bytes_per_token < 8 or kv_bytes_per_token % 8:
            raise ValueError(f"KV bytes a token must be a positive multiple of 8, not {kv_bytes_per_token}")
        self.words = kv_bytes_per_token // 8
        seed = int.from_bytes(hashlib.sha256(model.encode()).digest()[:8], "little")
        self._pattern: Words = np.random.default_rng(seed).integers(
            0, 1 << 63, size=self.words, dtype=np.uint64, endpoint=True
        )

    def write(self, rows: Words, seeds: Words) -> None:
        """Fill `rows` (tokens, words) with the content that `seeds` stand for."""
        np.bitwise_xor(self._pattern[None, :], seeds[:, None], out=rows)

    def matches(self, rows: Words, seeds: Words) -> bool:
        """Whether every byte of `rows` (tokens, words) is what it should be."""
        return bool(np.array_equal(rows ^ seeds[:, None], np.broadcast_to(self._pattern, rows.shape)))

    def columns(self, first: int, count: int) -> NDArray[np.intp]:
        """Which word of its row an answer reads, for tokens `first`...: all columns take part."""
        return (np.arange(first, first + count, dtype=np.intp) * 7919) % self.words


def digest(words: Words, first: int) -> int:
    """Order-dependent 64-bit summary of words read for tokens `first`...; summaries of adjacent
    ranges add up (modulo 2**64) to that of the whole."""
    positions = np.arange(first, first + len(words), dtype=np.uint64) * np.uint64(_PRIME)
    return int(np.add.reduce(mix(words ^ mix(positions)), dtype=np.uint64)) & _MASK


def draw(total: int) -> int:
    """A well mixed number from a digest: what the next token is chosen by."""
    return int(mix(np.array([total & _MASK], dtype=np.uint64))[0])
