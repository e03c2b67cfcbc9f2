"""Who may scrape now: bounded in flight, and no more of the loop's time than its share.

Where there is more to scrape than that allows, every endpoint waits a little longer: intervals stretch, and
requests do not. Endpoints that fail wait in a line of their own, so that hung ones hold up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

MAX_IN_FLIGHT: Final = 64
MAX_SUSPECTS: Final = 32
MAX_SHARE: Final = 0.5  # of the loop's time
_MEMORY: Final = 0.05  # weight of the newest cost in the average


class Turns:
    """Belongs to one event loop."""

    def __init__(self, max_share: float = MAX_SHARE) -> None:
        self._max_share = max_share
        self._good = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._suspects = asyncio.Semaphore(MAX_SUSPECTS)
        self._cost_s = 0.0
        self._next_s = 0.0

    @asynccontextmanager
    async def turn(self, *, suspect: bool) -> AsyncIterator[None]:
        """Wait for it, then hold it."""
        async with self._suspects if suspect else self._good:
            loop = asyncio.get_running_loop()
            now_s = loop.time()
            starts_s = max(now_s, self._next_s)
            self._next_s = starts_s + self._cost_s / self._max_share
            if starts_s > now_s:
                await asyncio.sleep(starts_s - now_s)
            yield

    def spent(self, cost_s: float) -> None:
        """What one scrape took of the loop."""
        self._cost_s += (cost_s - self._cost_s) * (_MEMORY if self._cost_s else 1.0)
