"""One listening port: HTTP/1.1, TLS or not, and nobody may connect and say nothing.

Closing it stops new connections; open ones go on until they are drained or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sidecar.relay import strip_library_headers

_MAX_FIELD_BYTES: Final = 64 << 10
_MAX_HEADERS: Final = 512
_CANCEL_GRACE_S: Final = 1.0  # for handlers to end after the drain time is over
_CLIENT_KEEPALIVE_S: Final = 3630.0  # longer than the gateway's hour
_LINGER_S: Final = 2.0  # to let a refused client read its answer before we stop reading its body
_BACKLOG: Final = 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NoPayload(logging.Filter):
    """Parse errors quote the bytes they stumbled over, which may be a prompt: keep their type."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "refused a request that is not HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True


_http_log = logging.getLogger("sidecar.http")
_http_log.addFilter(_NoPayload())


@dataclass(frozen=True, slots=True)
class Binding:
    """Where and how to listen. `head_timeout_s`: for the first request head of a new connection."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head_timeout_s: float


class Listener:
    """A started listener; `stop_accepting` and `close` end it, in this order."""

    def __init__(self, binding: Binding, handler: Handler) -> None:
        self._binding = binding
        self._handler = handler
        self._silent: dict[object, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(strip_library_headers)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            lingering_time=_LINGER_S,
            handler_cancellation=True,  # a client that leaves cancels its request, and so its legs
            auto_decompress=False,
            keepalive_timeout=_CLIENT_KEEPALIVE_S,
            shutdown_timeout=_CANCEL_GRACE_S,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            max_headers=_MAX_HEADERS,
        )

    async def start(self) -> None:
        """Bind.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        binding = self._binding
        handshake_s = binding.head_timeout_s if binding.tls is not None else None
        self._server = await asyncio.get_running_loop().create_server(
            self._accept,
            binding.host,
            binding.port,
            ssl=binding.tls,
            ssl_handshake_timeout=handshake_s,
            backlog=_BACKLOG,
        )

    @property
    def connections(self) -> int:
        """Open ones, idle or busy."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    def stop_accepting(self) -> None:
        """Close the port and idle connections; a busy one is closed behind its answer."""
        if self._server is not None:
            self._server.close()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()

    async def close(self) -> None:
        """Cancel what is still open."""
        self.stop_accepting()
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        connection = self._runner.server()
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(self._binding.head_timeout_s, self._give_up, connection)
        return connection

    def _give_up(self, connection: web.RequestHandler) -> None:
        self._silent.pop(connection, None)
        connection.force_close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        timer = self._silent.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        return await self._handler(request)
