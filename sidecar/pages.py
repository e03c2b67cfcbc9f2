"""The port that people and monitors read (/metrics, /debug): served by aiohttp, its silent connections ended.

aiohttp limits the time between two requests of a connection, not the time before its first one nor within
a request; whoever reaches this port could hold as many connections as the process has descriptors.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, cast

from aiohttp import web

SILENCE_S: Final = 60.0  # nothing has come for so long: longer than monitors wait between two scrapes
HANDSHAKE_S: Final = 10.0


class Pages:
    """One bound port. `port`: the one that was taken."""

    def __init__(self, runner: web.AppRunner, server: asyncio.Server) -> None:
        self._runner = runner
        self._server = server
        self.port = int(server.sockets[0].getsockname()[1])

    @classmethod
    async def start(
        cls,
        app: web.Application,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> Pages:
        """Serve `app` until `close`. Raises OSError: the port cannot be had."""
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        handlers = runner.server
        assert handlers is not None  # set up
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Watched(handlers(), silence_s),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            )
        except BaseException:
            await runner.cleanup()
            raise
        return cls(runner, server)

    async def close(self) -> None:
        """Stop listening, end what is open."""
        self._server.close()
        await self._runner.cleanup()


class _Watched(asyncio.Protocol):
    """Passes everything on to a connection's handler, and ends a connection that has been silent for
    `silence_s`."""

    __slots__ = ("_heard_s", "_inner", "_loop", "_silence_s", "_timer", "_transport")

    def __init__(self, inner: asyncio.Protocol, silence_s: float) -> None:
        self._inner = inner
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_at(self._heard_s + self._silence_s, self._look)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inner.connection_lost(exc)

    def _look(self) -> None:
        due_s = self._heard_s + self._silence_s
        if self._loop.time() >= due_s:
            self._timer = None
            self._transport.abort()
        else:
            self._timer = self._loop.call_at(due_s, self._look)
