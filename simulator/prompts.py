"""Made-up tokens, and the engine's names of their blocks. Texts share a prefix where their tokens do.

Tokens are uint32 arrays, because that is what the index reads fastest; nothing here is a real prompt.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from epp.core.hashing import BlockHasher
from epp.core.types import BlockKey
from simulator.tiers import Names

_ENGINE_HASHER = BlockHasher(b"simulated engine")
_ROOT = BlockKey(1)


def random_tokens(rng: random.Random, count: int) -> array[int]:
    """`count` ids that as good as never make an equal block twice."""
    found = array("I")
    found.frombytes(rng.randbytes(4 * count))
    return found


@dataclass(frozen=True, slots=True)
class Content:
    """Tokens with the names of their whole blocks, chained as an engine chains them. Parts share memory."""

    tokens: memoryview[int]  # format I
    names: Names  # the hashes of blocks
    block_tokens: int

    @classmethod
    def of(cls, tokens: array[int], block_tokens: int) -> Content:
        return cls(memoryview(array("I")), array("Q"), block_tokens).followed_by(tokens)

    def followed_by(self, tokens: array[int]) -> Content:
        """This text and then `tokens`: what is named already is not named again."""
        size, whole = self.block_tokens, array("I")
        whole.frombytes(self.tokens.cast("B"))
        whole += tokens
        text = memoryview(whole)
        parent = BlockKey(self.names[-1]) if self.names else _ROOT
        names = _ENGINE_HASHER.chain(parent, text[len(self.names) * size :].tobytes(), size)
        return Content(text, self.names + array("Q", names), size)

    def first(self, tokens: int) -> Content:
        """Its first `tokens`; nothing is copied but names."""
        return Content(self.tokens[:tokens], self.names[: tokens // self.block_tokens], self.block_tokens)
