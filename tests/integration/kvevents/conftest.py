"""Engines that are closed whatever a test does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio

from tests.integration.kvevents.rig import Engine


@pytest.fixture
async def new_engine() -> AsyncIterator[Callable[..., Engine]]:
    context = zmq.asyncio.Context()
    engines: list[Engine] = []

    def make(topic: bytes = b"kv-events") -> Engine:
        engine = Engine(context, topic)
        engine.open()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()
    context.destroy(linger=0)
