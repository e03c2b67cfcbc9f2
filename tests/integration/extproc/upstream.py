"""A tiny engine: remembers what arrived, answers with JSON or an SSE stream it hands out in pieces."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import dataclass, field

from aiohttp import web

EVENTS = [
    b": hello\n\n",
    b'data: {"choices":[{"text":"a"}],"usage":null}\n',
    b'\ndata: {"choices":[],"us',
    b'age":{"prompt_tokens":41,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":32}}}\n\n',
    b"data: " + b"z" * 150_000 + b"\n\n",
    b"data: [DONE]\n\n",
]
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}'
REFUSAL = b'{"error":{"message":"prompt must not be empty","code":400}}'
NAMED = b'{"id":"1", "model": "m"}'


@dataclass
class Upstream:
    name: str
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    address: str = ""
    hold: asyncio.Event | None = None  # stops an SSE stream after its second piece
    runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self.runner = web.AppRunner(app, auto_decompress=False)  # bodies as they came
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port)
        await site.start()
        host, port = self.runner.addresses[0][:2]
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.path == "/stream":
            return await self._stream(request)
        if request.path.startswith("/refuse/"):
            headers = {"x-upstream": self.name}
            return web.Response(status=400, body=REFUSAL, content_type="application/json", headers=headers)
        if request.path.startswith("/echo/"):
            return web.Response(body=b"data: " + self.bodies[-1] + b"\n\n", content_type="text/event-stream")
        if request.path == "/named":
            return web.Response(body=NAMED, content_type="application/json")
        if request.path == "/compressed":  # whatever the request allows
            headers = {"content-encoding": "gzip"}
            return web.Response(body=gzip.compress(NAMED), content_type="application/json", headers=headers)
        return web.Response(body=ANSWER, content_type="application/json", headers={"x-upstream": self.name})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, event in enumerate(EVENTS):
            if index == 2 and self.hold is not None:
                await self.hold.wait()
            await response.write(event)
        return response
