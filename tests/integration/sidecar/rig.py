"""A real sidecar on its own loopback address, and a raw client that sees every byte."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from sidecar.config import parse_config
from sidecar.server import Sidecar
from tests.integration.sidecar.doubles import WAIT_S, Answer, RecordingEngine, echo, recording_engine

PORT = 8000
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_counter = itertools.count(1)


def own_host() -> str:
    """A loopback address that nobody else on this machine uses."""
    n = next(_counter)
    return f"127.{100 + os.getpid() % 100}.{n // 250}.{n % 250 + 1}"


def row(host: str, port: int, **more: Any) -> dict[str, Any]:
    """A row of the endpoint file."""
    return {"pod": f"{host}-{port}", "host": host, "serving_port": port, **more}


@dataclass(frozen=True, slots=True)
class Rig:
    """A running sidecar and a client session."""

    sidecar: Sidecar
    host: str
    session: aiohttp.ClientSession
    pool_file: Path

    @property
    def address(self) -> str:
        return f"{self.host}:{PORT}"

    def url(self, path: str) -> URL:
        return URL(f"http://{self.address}{path}", encoded=True)

    def value(self, name: str, **labels: str) -> float:
        return self.sidecar.telemetry.value(f"kvpull_sidecar_{name}", **labels)

    async def post(self, path: str, body: Any, **headers: str) -> Answered:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json"}
        named.update({name.replace("_", "-"): value for name, value in headers.items()})
        async with self.session.post(self.url(path), data=io.BytesIO(raw), headers=named) as answer:
            return Answered(answer.status, answer.headers.copy(), await answer.read())


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def running(
    tmp_path: Path,
    engine: Any,
    *flags: str,
    host: str | None = None,
    pool: Sequence[dict[str, Any]] = (),
    connector: str = "offloading",
    tracing: bool = False,
    flags_env: dict[str, str] | None = None,
) -> AsyncIterator[Rig]:
    """A sidecar in front of `engine`; `pool` are the rows of its endpoint file."""
    host = host or own_host()
    pool_file = tmp_path / f"pool-{host}.json"
    await asyncio.to_thread(pool_file.write_text, json.dumps({"endpoints": list(pool)}))
    argv = ["--listen-host", host, "--port", str(PORT), "--model-server-host", engine.host]
    argv += ["--model-server-port", str(engine.port), "--kv-connector", connector]
    argv += ["--endpoints-file", str(pool_file), "--drain-timeout", "5s"]
    argv += ["--secure-proxy=false", f"--tracing={str(tracing).lower()}", *flags]
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        Sidecar(parse_config(argv, flags_env or {})) as sidecar,
        aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session,
    ):
        yield Rig(sidecar, host, session, pool_file)


@asynccontextmanager
async def proxied(
    tmp_path: Path, answer: Answer = echo, *flags: str, **more: Any
) -> AsyncIterator[tuple[RecordingEngine, Rig]]:
    """A recording engine with a sidecar in front of it."""
    async with (
        recording_engine(own_host(), answer) as engine,
        running(tmp_path, engine, *flags, **more) as rig,
    ):
        yield engine, rig


async def raw_exchange(host: str, request: bytes) -> bytes:
    """Send bytes, read until the server closes."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, PORT)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


def raw_post(path: str, body: bytes, *lines: str) -> bytes:
    """A request that asks the server to close after it."""
    head = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", "Connection: close"]
    head += [f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with a bound, for something that has no event of its own."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - counters of another party
            await asyncio.sleep(0.001)
