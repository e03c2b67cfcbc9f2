"""One serving vLLM with KV events, and the router's view of its cache, fed by the real event intake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.events import BatchResult, EventBatch
from epp.core.index_choice import choose_index
from epp.core.types import SchedulingRequest
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from tests.engine import processes

BLOCK_TOKENS: Final = 32  # the CPU attention of vLLM takes multiples of 32 only
WAIT_S: Final = 60.0
ENDPOINT: Final = EndpointId("engine")
ADAPTER: Final = "adapter"


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    source: EventSource


def serve_arguments(model: Path, port: int, more: Sequence[str]) -> list[str]:
    """`tcp://*:0` binds VLLM_HOST_IP, which is the loopback address here; the engine tells the port."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "topic": "kv@engine",
        "buffer_steps": 10_000,
    }
    options = {
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--block-size": str(BLOCK_TOKENS),
        "--max-model-len": "4096",
        "--max-num-seqs": "4",
        "--tool-call-parser": "pythonic",
        "--kv-events-config": json.dumps(events),
    }
    flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-auto-tool-choice", *more]
    flags.append("--enable-scale-out")  # the token-in and render APIs
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags]
    return command + [word for option in options.items() for word in option]


def lora_flags(adapter: Path) -> list[str]:
    """One adapter, of this name, in `adapter`."""
    return f"--enable-lora --max-loras 1 --max-lora-rank 8 --lora-modules {ADAPTER}={adapter}".split()


def connect(url: str) -> Engine:
    """Ask the engine where it publishes."""
    with urllib.request.urlopen(f"{url}/kv_event_sources", timeout=processes.START_TIMEOUT_S) as answer:
        told = json.load(answer)
    found = [str(value) for value in _texts(told) if str(value).startswith("tcp://")]
    ports = [urlsplit(address).port for address in found]
    assert len(ports) == 2, told
    return Engine(url, EventSource("127.0.0.1", int(ports[0] or 0), int(ports[1] or 0)))


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


class EngineView(CacheView):
    """The router's view of one engine, which can be waited for."""

    def __init__(self, salt_key: bytes | None = None) -> None:
        super().__init__(choose_index().make(b"parity-test-seed"), salt_key=salt_key)
        self.add_endpoint(ENDPOINT, has_replay=True)
        self._changed = asyncio.Event()

    def on_batch(
        self, endpoint: EndpointId, seq: int, batch: EventBatch | None, now_s: float, replayed: bool = False
    ) -> BatchResult:
        answer = super().on_batch(endpoint, seq, batch, now_s, replayed)
        self._changed.set()
        return answer

    def on_replay_end(self, endpoint: EndpointId, ok: bool, now_s: float) -> BatchResult:
        answer = super().on_replay_end(endpoint, ok, now_s)
        self._changed.set()
        return answer

    def depth(self, ids: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> int:
        """Blocks of this prompt that the router would count on."""
        request = SchedulingRequest("r", token_ids=ids, cache_salt=salt, lora_name=lora)
        match = self.match(request, [ENDPOINT])[ENDPOINT]
        return match.device_blocks if match.state.has_claim else 0

    def cpu_depth(self, ids: Sequence[int], *, salt: str | None = None) -> int:
        """Blocks of this prompt that the router would send a peer for."""
        match = self.match(SchedulingRequest("r", token_ids=ids, cache_salt=salt), [ENDPOINT])[ENDPOINT]
        return match.cpu_blocks if match.state.has_claim else 0

    async def until(self, holds: Callable[[], bool]) -> None:
        """Raises `TimeoutError` when `holds` does not come true."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def watching(engine: Engine, salt_key: bytes | None = None) -> AsyncIterator[EngineView]:
    """A new view on `engine` with its own event intake; what was said before comes by replay."""
    view = EngineView(salt_key)
    manager = KvEventsManager(view)
    manager.add_endpoint(ENDPOINT, engine.source)
    task = asyncio.create_task(manager.run())
    try:
        yield view
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
