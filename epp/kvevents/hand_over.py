"""A bounded queue from the receiving thread to the event loop, without locks.

One producer (the thread) and one consumer (the loop). It never blocks either. When it is full, the
thread stops reading subscriptions, which pushes back to the engines' own queues; a message lost there
is a gap in the sequence and is replayed. A running replay cannot be pushed back (its engine drops what is
not taken from it), so it is read on, and cut when the hand-over is `over`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class HandOverLimits:
    """When to stop reading subscriptions, and when to cut the replays that run."""

    items: int = 4_096
    size_bytes: int = 64 << 20
    most_bytes: int = 192 << 20


class HandOver(Generic[Item]):
    """`put` and `announce` on the thread, `take` and `ready` on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: HandOverLimits, on_room: Callable[[], None]
    ) -> None:
        """`on_room` is called on the loop when a full queue has been half emptied."""
        self.ready = asyncio.Event()
        self._loop = loop
        self._limits = limits
        self._on_room = on_room
        self._items: deque[tuple[Item, int]] = deque()
        # each counter has one writer, so their difference needs no lock
        self._put_bytes = 0
        self._taken_bytes = 0
        self._was_full = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def size_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def is_full(self) -> bool:
        """Thread: whether to stop reading; then `on_room` will be called."""
        full = len(self._items) >= self._limits.items or self.size_bytes >= self._limits.size_bytes
        if full:
            self._was_full = True
        return full

    def is_over(self) -> bool:
        """Thread: whether nothing more may be put at all."""
        return self.size_bytes >= self._limits.most_bytes

    def has_room(self) -> bool:
        """Loop: whether it is half empty; if not, `on_room` will be called."""
        if self._half_empty():
            return True
        self._was_full = True
        return False

    def put(self, item: Item, size_bytes: int) -> None:
        """Thread: append. The loop may sleep on until `announce`."""
        self._put_bytes += size_bytes
        self._items.append((item, size_bytes))

    def announce(self) -> None:
        """Thread: wake the loop if anything waits for it. Once for many items: a loop that is awake wants
        the interpreter lock, which the thread gives up with every read, and each time that is a switch."""
        if self._items:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
                self._loop.call_soon_threadsafe(self.ready.set)

    def take(self) -> Item | None:
        """Loop: the oldest item, or None. Clears `ready` when there is none."""
        if not self._items:
            self.ready.clear()
            if not self._items:
                return None
            self.ready.set()  # put between the two looks; its announcement may have come before the clear
        item, size_bytes = self._items.popleft()
        self._taken_bytes += size_bytes
        if self._was_full and self._half_empty():
            self._was_full = False
            self._on_room()
        return item

    def _half_empty(self) -> bool:
        limits = self._limits
        return len(self._items) * 2 <= limits.items and self.size_bytes * 2 <= limits.size_bytes
