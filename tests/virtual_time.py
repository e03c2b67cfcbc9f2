"""Timers without waiting: an event loop whose clock jumps to the next timer when nothing else can happen.

For code that asks the loop for the time and for nothing outside of the process. A wait that nothing will ever
end is an error at once, not a test that hangs.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Jumping(selectors.DefaultSelector):
    """Looks for events, but waits for none."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("every task waits, and no timer is set")
            self.now_s += max(timeout, 0.0)
        return events


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """What `main` returns. Its loop's clock begins at 0 and counts what was waited for."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
