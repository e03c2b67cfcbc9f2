"""Virtual time: a heap of things to do, done in order of time and, at the same time, of their making.

Nothing here knows the real clock, so the same inputs give the same run.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Timeline:
    """The only clock of a simulation. `now_s` moves when the next thing is done, never otherwise."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Do `call` at `when_s`; a time that has passed means now."""
        self._made += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._made, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + delay_s, call, *arguments)

    def run(self, while_true: Callable[[], bool] | None = None) -> None:
        """Do everything, or go on as long as `while_true` says so (asked before each step)."""
        heap = self._heap
        while heap and (while_true is None or while_true()):
            self.now_s, _, call, arguments = heapq.heappop(heap)
            self.done += 1
            call(*arguments)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Look for cycles a hundred times more seldom: a run makes millions of objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
