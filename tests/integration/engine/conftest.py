"""Starts emulated engines in this process, each on its own loopback address."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from deploy.local.engine.config import EngineConfig
from deploy.local.engine.server import serving
from tests.integration.engine.rig import BOUND_S, TOKENIZER, EngineClient, StartEngine

_HOSTS = itertools.count(1)


@pytest.fixture(autouse=True, scope="session")
def loopback_nixl() -> Iterator[None]:
    """Movers inherit this: NIXL over TCP on the loopback interface only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        patch.setenv("UCX_TLS", "tcp")
        yield


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[StartEngine]:
    """A starter of engines that compute in no time; all of them end with the block."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S))
        )

        async def start(**settings: Any) -> EngineClient:
            number = next(_HOSTS)
            values: dict[str, Any] = {
                "tokenizer": TOKENIZER,
                "name": f"engine-{number}",
                "host": f"127.0.9.{number}",
                "model": "m",
                "peer_keys": (b"k" * 32,),
                "device_tokens": 8192,
                "cpu_tokens": 16_384,
                "max_model_len": 8192,
                "time_scale": 0.0,
                "pull_base_s": 10.0,
                "pull_max_s": 20.0,
                "enable_faults": True,
                "drain_s": 0.5,
            }
            ports = dict.fromkeys(("port", "p2p_port", "events_port", "replay_port"), 0)
            running = await stack.enter_async_context(serving(EngineConfig(**(values | ports | settings))))
            return EngineClient(running, session)

        yield start


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Engines of one test."""
    async with engines() as start:
        yield start


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_engine() -> AsyncIterator[EngineClient]:
    """One engine for a module whose tests need no fresh one (mark it `loop_scope="module"`)."""
    async with engines() as start:
        yield await start()
