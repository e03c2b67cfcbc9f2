"""Gives this replica's view to siblings that ask, on a port of its own.

Only endpoints with a claim are given, one after the other, each as of the moment it is sent: a large
index is never copied as a whole, and the loop is held for one endpoint's dump at most. Certificates are
demanded before the first byte. Connections, their waits and what they may take in all are bounded; a
sibling that reads too slowly is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from epp.core.errors import ConfigError
from epp.siblings import wire

log = logging.getLogger(__name__)

_BACKLOG = 16


class SnapshotSource(Protocol):
    """What there is to give. Called on the loop; never awaits."""

    @property
    def seed(self) -> bytes: ...

    @property
    def scheme(self) -> str: ...

    def rows(self) -> Iterable[wire.Row | None]:
        """Views of the endpoints that have a claim. Read lazily: the pool may change meanwhile. None: a view
        is still being made, and the loop may do something else."""
        ...

    def __len__(self) -> int:
        """How many rows there can be."""
        ...


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen, and bounds."""

    host: str
    port: int
    connections: int = 8  # shaking hands or waiting for their turn
    serving: int = 2  # taking a snapshot
    idle_s: float = 5.0  # for the handshake, the request, and each slice
    total_s: float = 60.0
    slice_bytes: int = 256 << 10


@dataclass(slots=True)
class ServerCounters:
    """Totals; plain values for telemetry."""

    served: int = 0
    refused: int = 0  # a version we do not speak, or no request at all
    untrusted: int = 0  # no handshake: certificate, protocol, or time
    cut: int = 0  # the sibling went away or was too slow
    failed: int = 0  # by a fault of our own
    sent_bytes: int = 0
    sent_rows: int = 0
    skipped_rows: int = 0  # of endpoints that do not fit the format


class SnapshotServer:
    """`start` binds; `run` serves until cancelled."""

    def __init__(
        self, source: SnapshotSource, context: Callable[[], ssl.SSLContext], settings: ServerSettings
    ) -> None:
        """`context` is asked at every connection, so that certificates can change."""
        self._source = source
        self._context = context
        self._settings = settings
        self._turns = asyncio.Semaphore(settings.serving)
        self._socket: socket.socket | None = None
        self.counters = ServerCounters()
        self.port = settings.port

    def start(self) -> None:
        """Bind.

        Raises:
            ConfigError: the address cannot be had.
        """
        settings = self._settings
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (settings.host, settings.port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(f"snapshot port {settings.host}:{settings.port}: {error.strerror}") from error
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled; closes the port then."""
        assert self._socket is not None, "start comes first"
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(self._settings.connections)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await room.acquire()
                    try:
                        connection, (peer, *_) = await loop.sock_accept(self._socket)
                    except OSError as error:  # no descriptor left, for one
                        log.warning("snapshot port: %s", error.strerror)
                        room.release()
                        await asyncio.sleep(self._settings.idle_s)
                        continue
                    task = tasks.create_task(self._serve(connection, peer))
                    task.add_done_callback(lambda _: room.release())
        finally:
            self.close()

    def close(self) -> None:
        """Give the port back; for a server that never ran. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        """One sibling, from the handshake to the end; never raises."""
        with connection:
            try:
                reader, writer = await self._shake_hands(connection)
            except OSError as error:  # TLS and time-out are among them
                self.counters.untrusted += 1
                log.warning("snapshot: %s was not let in: %s", peer, type(error).__name__)
                return
            await self._attend(reader, writer, peer)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        try:
            async with asyncio.timeout(self._settings.total_s):
                await self._answer(reader, writer, peer)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.counters.cut += 1
            log.warning("snapshot for %s was cut off: %s", peer, type(error).__name__)
        except wire.FormatError as error:
            self.counters.refused += 1
            log.warning("snapshot: %s was refused: %s", peer, error)
        except Exception:  # task guard: a fault here must not end the picker
            self.counters.failed += 1
            log.exception("snapshot for %s failed", peer)
        finally:
            writer.transport.abort()

    async def _shake_hands(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._context(),
            ssl_handshake_timeout=self._settings.idle_s,
        )
        transport.set_write_buffer_limits(high=self._settings.slice_bytes)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        async with asyncio.timeout(self._settings.idle_s):
            request = await reader.readexactly(wire.REQUEST_BYTES)
        version = wire.decode_request(request)
        if version != wire.VERSION:
            await self._send(writer, wire.encode_header(wire.Refusal(wire.VERSION, "version")))
            await self._finish(writer)
            raise wire.FormatError(f"version {version} is asked for, {wire.VERSION} is spoken")
        async with self._turns:
            rows = await self._send_all(writer)
        self.counters.served += 1
        log.info("snapshot of %d endpoints given to %s", rows, peer)
        await self._finish(writer)

    async def _send_all(self, writer: asyncio.StreamWriter) -> int:
        source, rows = self._source, 0
        hello = wire.Hello(wire.VERSION, source.seed, source.scheme, len(source))
        await self._send(writer, wire.encode_header(hello))
        for row in source.rows():
            if row is None:
                await asyncio.sleep(0)
                continue
            try:
                pieces = wire.encode_row(row)
            except wire.FormatError as error:
                self.counters.skipped_rows += 1
                log.warning("snapshot without %s: %s", row.endpoint, error)
                continue
            for piece in pieces:
                await self._send(writer, piece)
            rows += 1
            self.counters.sent_rows += 1
        await self._send(writer, wire.encode_header(wire.End(rows)))
        return rows

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self._settings.slice_bytes
        for at in range(0, len(data), size):
            piece = memoryview(data)[at : at + size]
            writer.write(piece)
            self.counters.sent_bytes += len(piece)
            async with asyncio.timeout(self._settings.idle_s):
                await writer.drain()

    async def _finish(self, writer: asyncio.StreamWriter) -> None:
        """Everything is sent before the connection is dropped; a peer that is gone has it or not."""
        writer.close()
        with suppress(OSError):
            async with asyncio.timeout(self._settings.idle_s):
                await writer.wait_closed()
