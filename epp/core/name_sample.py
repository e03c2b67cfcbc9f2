"""A sample of what one engine calls its blocks: (our key, the engine's name) of its smallest keys.

Why: two engines that name the same content differently have different hash seeds or algorithms, and
no pull between them can work (case S-C16). Keys are uniform, so the smallest keys of two endpoints
overlap in proportion to what they share; nobody has to keep a second table from keys to names.
A pair stays in the sample after the block is gone: how an engine hashes does not change while it runs.
"""

from __future__ import annotations

from epp.core.types import BlockKey, EngineBlockHash

SAMPLE_SIZE = 64  # pairs kept at least, once there were that many; at most twice as many


class NameSample:
    """Pairs of one endpoint since its last clear. `below`: only smaller keys need be noted."""

    __slots__ = ("_pairs", "below")

    def __init__(self) -> None:
        self._pairs: dict[BlockKey, EngineBlockHash] = {}
        self.below = 1 << 64

    def note(self, key: BlockKey, name: EngineBlockHash) -> None:
        """Mutates: the engine calls content `key` by `name`. The first name of a key stays."""
        self._pairs.setdefault(key, name)
        if len(self._pairs) >= 2 * SAMPLE_SIZE:
            kept = sorted(self._pairs)[:SAMPLE_SIZE]  # of the keys alone: pairs compare ten times as slowly
            self._pairs = {kept_key: self._pairs[kept_key] for kept_key in kept}
            self.below = kept[-1]

    def pairs(self) -> dict[BlockKey, EngineBlockHash]:
        return dict(self._pairs)
