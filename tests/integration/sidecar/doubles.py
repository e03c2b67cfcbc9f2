"""Engine doubles: real HTTP servers on loopback that record what reaches them.

`RecordingEngine` answers through a handler a test gives it. `RawEngine` writes bytes to a socket,
for what no HTTP library would send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    peer_host: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


Answer = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


async def echo(_: web.Request, received: Received) -> web.StreamResponse:
    """The request's body back, so that a client can compare bytes."""
    return web.Response(body=received.body, content_type="application/octet-stream")


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    """Always the same answer."""

    async def answer(_: web.Request, __: Received) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, body=body, headers=named)

    return answer


@dataclass
class RecordingEngine:
    """`answer` may be changed while it runs. `cancelled` counts requests whose client went away."""

    host: str
    answer: Answer = echo
    port: int = 0
    received: list[Received] = field(default_factory=list)
    connections: set[str] = field(default_factory=set)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def last(self) -> Received:
        return self.received[-1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peer = request.transport.get_extra_info("peername")
        self.connections.add(f"{peer[0]}:{peer[1]}")
        try:
            received = Received(
                request.method,
                request.raw_path,
                [(key.decode(), value.decode("latin-1")) for key, value in request.raw_headers],
                await request.read(),
                peer[0],
            )
            self.received.append(received)
            self.arrived.set()
            return await self.answer(request, received)
        except asyncio.CancelledError:
            self.cancelled.release()
            raise

    async def wait_cancelled(self) -> None:
        """Until one more request was given up by its client."""
        async with asyncio.timeout(WAIT_S):
            await self.cancelled.acquire()

    async def wait_arrived(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.arrived.wait()
        self.arrived.clear()


@asynccontextmanager
async def recording_engine(host: str, answer: Answer = echo, port: int = 0) -> AsyncIterator[RecordingEngine]:
    engine = RecordingEngine(host, answer)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        engine.port = site.port
        yield engine
    finally:
        await runner.cleanup()


@dataclass
class RawEngine:
    """Reads one request head (and the body its content-length names), then runs `script`."""

    host: str
    script: Callable[[RawEngine, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0

    async def read_request(self, reader: asyncio.StreamReader) -> bytes:
        """The next request's head; empty when the client has closed."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        self.heads.append(head)
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.split(b":")[1]))
        return head

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self.script(self, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_engine(
    host: str,
    script: Callable[[RawEngine, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[RawEngine]:
    engine = RawEngine(host, script)
    server = await asyncio.start_server(engine.serve, host, 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        await server.wait_closed()
