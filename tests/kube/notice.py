"""A bounded wait for something that a test expects, woken by whoever knows of a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BOUND_S = 30.0


class Notice:
    """`tell` wakes everybody who waits in `until`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self, *_: object) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not predicate():
                await self._event.wait()
