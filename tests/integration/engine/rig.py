"""An emulated engine of this process as a test sees it: real HTTP outside, its bookkeeping inside."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.engine.server import Running
from engine_plugin import wire

TOKENIZER = Path(__file__).parents[3] / "config" / "tokenizer"
BOUND_S = 30.0
BLOCK = 16
BLOCK_BYTES = BLOCK * 2048


def prompt_ids(tokens: int, salt: int = 0) -> list[int]:
    """A prompt of ordinary tokens; another `salt` shares no block with it."""
    return [100 + (index * 7919 + salt * 104_729) % 8000 for index in range(tokens)]


async def until(condition: Callable[[], bool]) -> None:
    """Bounded wait for what has no event to wait on."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 (plain values, no event to wait for)
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Reply:
    status: int
    body: dict[str, Any]
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(slots=True)
class EngineClient:
    """One engine with what a test asks of it."""

    running: Running
    session: aiohttp.ClientSession

    @property
    def host(self) -> str:
        return self.running.assembly.config.host

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.running.port}"

    @property
    def instance(self) -> str:
        return self.running.assembly.identity.instance

    @property
    def p2p(self) -> tuple[str, int]:
        return (self.host, self.running.p2p_port)

    def source(self, request_id: str = "pull-1") -> dict[str, Any]:
        """`kv_transfer_params` that name this engine as the source."""
        return {wire.REMOTE_KV_SOURCE: wire.kv_source_params(request_id, *self.p2p)}

    async def post(self, path: str, body: Any, request_id: str | None = None) -> Reply:
        headers = {"x-request-id": request_id} if request_id else {}
        async with self.session.post(self.base + path, json=body, headers=headers) as response:
            return Reply(response.status, await response.json())

    async def complete(
        self,
        prompt: Any,
        *,
        max_tokens: int = 4,
        transfer: dict[str, Any] | None = None,
        request_id: str | None = None,
        **more: Any,
    ) -> Reply:
        """A completion that must succeed, with the engine's own report of it."""
        request_id = request_id or uuid.uuid4().hex
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **more}
        if transfer is not None:
            body[wire.KV_TRANSFER_PARAMS] = transfer
        reply = await self.post("/v1/completions", body, request_id)
        assert reply.status == 200, reply.body
        reply.report = await self.report(request_id)
        return reply

    async def report(self, request_id: str) -> dict[str, Any]:
        async with self.session.get(f"{self.base}/debug/requests/{request_id}") as response:
            assert response.status == 200
            report: dict[str, Any] = await response.json()
            return report

    async def reset(self, *, cpu_too: bool = False) -> None:
        query = "?reset_external=true" if cpu_too else ""
        async with self.session.post(f"{self.base}/reset_prefix_cache{query}") as response:
            assert response.status == 200

    async def metrics(self) -> str:
        async with self.session.get(f"{self.base}/metrics") as response:
            return await response.text()

    async def counter(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where it is absent."""
        for family in text_string_to_metric_families(await self.metrics()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    async def quiet(self) -> None:
        """Wait until nothing is running, pulled, leased or pinned any more, then check that."""
        parts = self.running.engine.parts
        assert await self.running.engine.drain(BOUND_S)
        await until(lambda: not (parts.store.leases or parts.store.supplies or parts.cache.cpu.in_use))
        parts.cache.check_integrity()
        assert parts.cache.device.in_use == 0
        assert parts.cache.cpu.in_use == 0


StartEngine = Callable[..., Awaitable[EngineClient]]
