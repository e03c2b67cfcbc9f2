"""Live batches that wait for the end of a replay, oldest first, within bounds. Pure.

When there is no room the oldest is dropped: that leaves a hole in front of the rest, which is found when
they are applied, and replayed. So the newest always stays, whatever it takes: without it no hole would
be seen. It must not know what a sequence number means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from epp.core.events import Batch
from epp.core.stream_step import StreamLimits


class HeldBatches:
    """A queue of (sequence number, batch)."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._held: deque[tuple[int, Batch, int]] = deque()
        self._events = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return ((seq, batch) for seq, batch, _ in self._held)

    @property
    def first(self) -> tuple[int, Batch]:
        """Of a queue that is not empty, as is `last`."""
        return self._held[0][:2]

    @property
    def last(self) -> tuple[int, Batch]:
        return self._held[-1][:2]

    def append(self, seq: int, batch: Batch) -> None:
        """Mutates: the newest batch; drops the oldest where there is no room."""
        size_bytes = batch.size_bytes
        self._held.append((seq, batch, size_bytes))
        self._events += batch.event_count
        self.size_bytes += size_bytes
        while len(self._held) > 1 and self._is_too_much:
            self.pop()

    @property
    def _is_too_much(self) -> bool:
        limits = self._limits
        return (
            len(self._held) > limits.held_batches
            or self._events > limits.held_events
            or self.size_bytes > limits.held_bytes
        )

    def pop(self) -> None:
        """Mutates: the oldest leaves."""
        _, batch, size_bytes = self._held.popleft()
        self._events -= batch.event_count
        self.size_bytes -= size_bytes

    def clear(self) -> None:
        """Mutates: all leave."""
        self._held.clear()
        self._events = self.size_bytes = 0
