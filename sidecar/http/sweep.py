"""One timer that looks at the deadlines of many connections, instead of one a piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_MAX_INTERVAL_S: Final = 1.0
_PER_LIMIT: Final = 4  # a deadline is kept within a quarter of itself


class Sweep:
    """Calls `look(now_s)` again and again between `start` and `stop`; `now_s` is the event loop's time."""

    def __init__(self, shortest_limit_s: float, look: Callable[[float], None]) -> None:
        self._interval_s = min(_MAX_INTERVAL_S, shortest_limit_s / _PER_LIMIT)
        self._look = look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._turn)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self.start()
        self._look(asyncio.get_running_loop().time())
