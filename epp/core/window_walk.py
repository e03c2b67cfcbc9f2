"""The longest prefix that several groups of blocks can serve, each from a window at its end.

A prefix of d blocks fits a group that holds the last `needed` blocks before d, or all d where there
are fewer. The largest d is usually the one asked about, so the search goes down from it. Pure
functions; they must not know endpoints, tiers or events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from epp.core.types import BlockKey


class Lane(dict[BlockKey, int]):
    """What one group holds in one tier: content -> how many of its names have a copy there."""

    __slots__ = ()

    def add(self, key: BlockKey) -> None:
        """Mutates: one more name."""
        self[key] = self.get(key, 0) + 1

    def add_all(self, keys: Sequence[BlockKey]) -> None:
        """Mutates: `add` for each."""
        before = len(self)
        if self.keys().isdisjoint(keys):
            self.update(dict.fromkeys(keys, 1))
            if len(self) - before == len(keys):
                return
            for key in keys:  # some of them are equal
                self.pop(key, None)
        for key in keys:
            self.add(key)

    def drop(self, key: BlockKey) -> None:
        """Mutates: one name fewer. Raises KeyError if there is none."""
        if self[key] == 1:
            del self[key]
        else:
            self[key] -= 1

    def counts(self) -> dict[BlockKey, int]:
        """All of it. For tests."""
        return dict(self)


_ROUNDS = 16  # of every group in turn, before one pass over all blocks is cheaper


def deepest(
    keys: Sequence[BlockKey], depth: int, held: Sequence[Collection[BlockKey]], needed: Sequence[int]
) -> int:
    """The largest d of at most `depth` blocks that fits every group; `held` and `needed` in blocks, one
    of each a group. `held` is only asked for membership."""
    for _ in range(_ROUNDS):
        lowest = depth
        for blocks, count in zip(held, needed, strict=True):
            lowest = _end_of_window(keys, lowest, blocks, count)
        if lowest == depth:
            return depth
        depth = lowest
    return _scan(keys, depth, held, needed)


def _end_of_window(keys: Sequence[BlockKey], depth: int, held: Collection[BlockKey], needed: int) -> int:
    """The largest end of at most `depth` that fits one group."""
    if all(map(held.__contains__, keys[max(0, depth - needed) : depth])):  # the usual case, in C
        return depth
    end = at = depth
    while at and end - at < needed:
        at -= 1
        if keys[at] not in held:
            end = at
    return end


def _scan(
    keys: Sequence[BlockKey], depth: int, held: Sequence[Collection[BlockKey]], needed: Sequence[int]
) -> int:
    """The same by one pass from block 0 on, for groups that disagree again and again."""
    runs = [0] * len(held)
    best = 0
    for at in range(depth):
        fits = True
        for group, blocks in enumerate(held):
            runs[group] = runs[group] + 1 if keys[at] in blocks else 0
            fits = fits and runs[group] >= min(needed[group], at + 1)
        if fits:
            best = at + 1
    return best
