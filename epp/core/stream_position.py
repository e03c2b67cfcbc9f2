"""Where an event stream stands, and how the batches before that point are told from another engine's.

An engine process is recognised by the digests of what it sent: its replay repeats its own batches, so
one that answers with another digest (or not at all) is another process. The same fact lets a sibling
go on from where we stand: it learns our position and has the engine confirm it.

This module must not know what is in a batch, nor claim states.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

MAX_OVERLAP_BATCHES = 16  # batches before the position that a sibling has the engine repeat
_MAX_SEQ = 1 << 63  # as the wire bounds it
_MAX_DIGEST = 1 << 64


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Everything before `next_seq` was applied, from sequence 0 on if `exact`. `digests` are those of
    the last applied batches, oldest first; the newest is of batch `next_seq - 1`."""

    next_seq: int
    exact: bool
    digests: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        """Whether it can be a position at all; what the engine says of it is another matter."""
        count = len(self.digests)
        return (
            0 < self.next_seq < _MAX_SEQ
            and 0 < count <= min(self.next_seq, MAX_OVERLAP_BATCHES)
            and all(0 <= digest < _MAX_DIGEST for digest in self.digests)
        )


class Digests:
    """Digests of the last applied batches, whose sequence numbers are contiguous."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.clear()

    def clear(self) -> None:
        self._ring = array("Q")
        self._first = self._next = 0

    @property
    def oldest(self) -> int:
        """The lowest sequence number whose digest is known; the next one if none is."""
        return max(self._first, self._next - self._size)

    def add(self, seq: int, digest: int) -> None:
        if seq != self._next:
            self.clear()
            self._first = self._next = seq
        if len(self._ring) < self._size:
            self._ring.append(digest)
        else:
            self._ring[(seq - self._first) % self._size] = digest
        self._next = seq + 1

    def get(self, seq: int) -> int | None:
        return self._ring[(seq - self._first) % self._size] if self.oldest <= seq < self._next else None

    def last(self, count: int) -> tuple[int, ...]:
        """Of the newest batches, oldest first; at most `count`."""
        first = max(self.oldest, self._next - count)
        return tuple(self._ring[(seq - self._first) % self._size] for seq in range(first, self._next))
