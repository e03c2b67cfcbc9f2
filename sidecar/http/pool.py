"""Connections to engines, kept between calls: by address, the youngest first, for a limited time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from sidecar.endpoint import HostPort
from sidecar.http.client import ClientConnection
from sidecar.http.sweep import Sweep


class ConnectionPool:
    """`tls` is asked for every new connection; None: plain HTTP. `bind_host`: source address of them all."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        max_idle_per_host: int,
        bind_host: str | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keepalive_s = keepalive_s
        self._max_idle_per_host = max_idle_per_host
        self._local = (bind_host, 0) if bind_host else None
        self._tls = tls
        self._idle: dict[HostPort, list[ClientConnection]] = {}
        self._addresses: dict[ClientConnection, HostPort] = {}
        self._sweep = Sweep(min(idle_timeout_s, keepalive_s), self._look)
        self._sweep.start()

    def take(self, address: HostPort) -> ClientConnection | None:
        """An idle connection that is young enough, or None."""
        idle = self._idle.get(address)
        oldest_s = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.moved_s >= oldest_s and not connection.transport.is_closing():
                return connection
            connection.abort()
        return None

    async def open(self, address: HostPort) -> ClientConnection:
        """A new connection.

        Raises:
            OSError: refused, no route, not in time, or not the certificate that it should have.
        """
        context = self._tls() if self._tls is not None else None
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self),
                address.host,
                address.port,
                ssl=context,
                local_addr=self._local,
            )
        if not connection.lost:
            self._addresses[connection] = address
        return connection

    def give_back(self, connection: ClientConnection) -> None:
        """A call is over and another one may follow."""
        idle = self._idle.setdefault(self._addresses[connection], [])
        if len(idle) >= self._max_idle_per_host:
            connection.abort()
        else:
            idle.append(connection)

    def lost(self, connection: ClientConnection) -> None:
        """It has ended."""
        address = self._addresses.pop(connection, None)
        idle = self._idle.get(address, ()) if address is not None else ()
        if address is not None and connection in idle:
            self._idle[address].remove(connection)
            if not self._idle[address]:
                del self._idle[address]

    async def close(self) -> None:
        """End every connection; back when their sockets are closed."""
        self._sweep.stop()
        for connection in list(self._addresses):
            connection.abort()
        await asyncio.sleep(0)

    def _look(self, now_s: float) -> None:
        for connection in list(self._addresses):
            connection.check(now_s, self._idle_timeout_s)
        for idle in list(self._idle.values()):
            for connection in [c for c in idle if now_s - c.moved_s > self._keepalive_s]:
                connection.abort()
