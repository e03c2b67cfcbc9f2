"""One listening port: HTTP/1.1, TLS or not, and nobody may connect and say nothing.

Closing it stops new connections; open ones go on until they are drained or cancelled.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final

from sidecar.errors import NotHttp, json_body
from sidecar.http.message import BadMessage
from sidecar.http.server import ServerConnection
from sidecar.http.service import Handler, Service
from sidecar.http.sweep import Sweep

_CANCEL_GRACE_S: Final = 1.0  # for handlers to end after the drain time is over
_CLIENT_KEEPALIVE_S: Final = 3630.0  # longer than the gateway's hour
_BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True)
class Binding:
    """Where and how to listen.

    `head_timeout_s`: for a request's head; `idle_timeout_s`: for a client that takes nothing."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head_timeout_s: float
    idle_timeout_s: float


class Listener:
    """A started listener; `stop_accepting` and `close` end it, in this order."""

    def __init__(self, binding: Binding, handler: Handler) -> None:
        self._binding = binding
        self._service = Service(
            handler, _refusal, binding.head_timeout_s, binding.idle_timeout_s, _CLIENT_KEEPALIVE_S
        )
        self._server: asyncio.Server | None = None
        self._sweep = Sweep(min(binding.head_timeout_s, binding.idle_timeout_s), self._look)

    async def start(self) -> None:
        """Bind.

        Raises:
            OSError: the address cannot be bound.
        """
        binding = self._binding
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ServerConnection(self._service),
            binding.host,
            binding.port,
            ssl=binding.tls,
            ssl_handshake_timeout=binding.head_timeout_s if binding.tls is not None else None,
            backlog=_BACKLOG,
        )
        self._sweep.start()

    @property
    def connections(self) -> int:
        """Open ones, idle or busy."""
        return len(self._service.connections)

    def stop_accepting(self) -> None:
        """Close the port and idle connections; a busy one is closed behind its answer."""
        if self._server is not None:
            self._server.close()
        self._service.draining = True
        for connection in list(self._service.connections):
            connection.stop()

    async def close(self) -> None:
        """Cancel what is still open."""
        self.stop_accepting()
        self._sweep.stop()
        tasks = [task for connection in list(self._service.connections) if (task := connection.cancel())]
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_GRACE_S)
        await asyncio.sleep(0)

    def _look(self, now_s: float) -> None:
        for connection in list(self._service.connections):
            connection.check(now_s)


def _refusal(fault: BadMessage) -> bytes:
    return json_body(NotHttp(f"Not a request this endpoint takes: {fault}", fault.status))
