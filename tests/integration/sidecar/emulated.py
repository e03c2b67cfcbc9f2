"""Emulated engines of this process, as the rig wants to see an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.local.engine.config import EngineConfig
from deploy.local.engine.server import Running, serving
from tests.integration.sidecar.rig import own_host, row

_TOKENIZER = Path(__file__).parents[3] / "config" / "tokenizer"
BLOCK = 16  # tokens


@contextmanager
def loopback_nixl() -> Iterator[None]:
    """Movers inherit this: NIXL over TCP on the loopback interface only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        patch.setenv("UCX_TLS", "tcp")
        yield


class Target:
    """One engine."""

    def __init__(self, engine: Running) -> None:
        self.engine = engine.engine
        self.transport = engine.assembly.transport
        self.host, self.port = engine.assembly.config.host, engine.port
        self.row: dict[str, Any] = row(self.host, self.port, p2p_port=engine.p2p_port)
        self.address = f"{self.host}:{self.port}"

    def report(self, request_id: str) -> Any:
        """What became of a request, in tokens."""
        found = self.engine.requests.get(request_id)
        assert found is not None, request_id
        return found


@asynccontextmanager
async def emulated(**settings: Any) -> AsyncIterator[Target]:
    """An engine that computes in no time."""
    values: dict[str, Any] = dict(
        tokenizer=_TOKENIZER,
        host=own_host(),
        port=0,
        p2p_port=0,
        events_port=0,
        replay_port=0,
        model="m",
        insecure=True,
        device_tokens=8192,
        cpu_tokens=16_384,
        max_model_len=8192,
        time_scale=0.0,
        pull_base_s=10.0,
        pull_max_s=20.0,
        drain_s=0.5,
    )
    async with serving(EngineConfig(**(values | settings))) as engine:
        yield Target(engine)


def prompt_ids(tokens: int) -> list[int]:
    """A prompt of ordinary tokens."""
    return [100 + (n * 7919) % 8000 for n in range(tokens)]
