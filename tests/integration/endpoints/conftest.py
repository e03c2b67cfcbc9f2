"""Real HTTP servers that behave well or badly, and a collector that can be waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from aiohttp import web

T = TypeVar("T")
BOUND_S = 30.0


class Collector(Generic[T]):
    """Everything that was reported, and a bounded wait for what a test expects."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, item: T) -> None:
        self.items.append(item)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, predicate: Callable[[list[T]], bool]) -> list[T]:
        async with asyncio.timeout(BOUND_S), self._arrived:
            await self._arrived.wait_for(lambda: predicate(self.items))
        return self.items

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()


@asynccontextmanager
async def running(component: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """`component` as a task that is cancelled, and must end, at the end of the block."""
    task = asyncio.ensure_future(component)
    try:
        yield task  # type: ignore[misc]
    finally:
        task.cancel()
        async with asyncio.timeout(BOUND_S):
            with contextlib.suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def metrics_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[int]:
    """An HTTP server with `/metrics`; yields its port."""
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
