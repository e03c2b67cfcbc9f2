"""One timer for all the waits of a stream: a timer for each would cost as much as the waits themselves.

The timer is set once and looks, when it fires, whether what is awaited now is overdue; if so, it cancels
the task that waits, which sees `expired`. Must not be shared between tasks.
"""

from __future__ import annotations

import asyncio


class Deadline:
    """Of the task that makes it. `arm` before a wait, `disarm` behind it, `close` at the end."""

    __slots__ = ("_due_s", "_loop", "_period_s", "_task", "_timer", "expired")

    def __init__(self, shortest_s: float) -> None:
        """`shortest_s`: no `arm` may ask for less."""
        task = asyncio.current_task()
        assert task is not None, "a deadline belongs to a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._period_s = shortest_s
        self._due_s: float | None = None
        self._timer = self._loop.call_later(shortest_s, self._look)
        self.expired = False

    def arm(self, limit_s: float) -> None:
        """From now on the task is cancelled when `limit_s` have passed."""
        self._due_s = self._loop.time() + limit_s

    def disarm(self) -> None:
        self._due_s = None

    def take(self) -> bool:
        """Behind a CancelledError: whether it was ours, which is thereby settled."""
        self._due_s = None
        if not self.expired:
            return False
        self.expired = False
        return self._task.uncancel() == 0

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = self._due_s
        if due_s is not None and due_s <= now_s:
            self.expired = True
            self._due_s = None
            self._task.cancel()
            due_s = None
        # what is armed later than now is due after a period at the earliest: no wait is overlooked
        self._timer = self._loop.call_at(now_s + self._period_s if due_s is None else due_s, self._look)
