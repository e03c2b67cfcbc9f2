"""A replica's snapshot server with rows made up by the test, and siblings that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from epp.siblings import wire
from epp.siblings.client import ClientSettings, SiblingAddress, Snapshot, fetch_snapshot
from epp.siblings.reader import IndexIdentity, ReadLimits
from epp.siblings.server import ServerSettings, SnapshotServer
from epp.siblings.tls import MutualTls
from tests.integration.siblings.certificates import NAME

WAIT_S = 20.0
HOST = "127.0.0.1"
SEED = b"0123456789abcdef"
SCHEME = "s-1"
PATIENT = ClientSettings(connect_s=10.0, total_s=15.0)
SHORT_S = 1.0  # a wait that a test sits out; still long for a busy machine
QUICK = ClientSettings(connect_s=10.0, total_s=15.0, limits=ReadLimits(idle_s=SHORT_S))


@dataclass
class Source:
    """What a replica has to give."""

    given: list[wire.Row] = field(default_factory=list)
    seed: bytes = SEED
    scheme: str = SCHEME

    def rows(self) -> Iterator[wire.Row]:
        yield from self.given

    def __len__(self) -> int:
        return len(self.given)


@contextlib.asynccontextmanager
async def serving(
    source: Source, directory: Path, settings: ServerSettings | None = None
) -> AsyncIterator[SnapshotServer]:
    server = SnapshotServer(source, MutualTls(directory).server_context, settings or ServerSettings(HOST, 0))
    server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, WAIT_S)
        server.close()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def misbehaving(talk: Talk, directory: Path) -> AsyncIterator[int]:
    """A sibling with a good certificate that says what the test wants; yields its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(wire.REQUEST_BYTES)
            await talk(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(greet, HOST, 0, ssl=MutualTls(directory).server_context())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def at(port: int, name: str = NAME) -> SiblingAddress:
    return SiblingAddress(HOST, port, name)


async def ask(
    directory: Path | Callable[[], ssl.SSLContext],
    *ports: int,
    seed: bytes | None = None,
    scheme: str = SCHEME,
    settings: ClientSettings = PATIENT,
    name: str = NAME,
) -> Snapshot:
    context = MutualTls(directory).client_context if isinstance(directory, Path) else directory
    async with asyncio.timeout(WAIT_S):
        return await fetch_snapshot(
            [at(port, name) for port in ports], context, IndexIdentity(scheme, seed), settings
        )


async def counted(server: SnapshotServer, **expected: int) -> None:
    """Returns when the server has counted so; a client can be done a moment before it.
    A yield, not a wait: product code has no event for tests."""
    async with asyncio.timeout(WAIT_S):
        while any(getattr(server.counters, name) != count for name, count in expected.items()):  # noqa: ASYNC110
            await asyncio.sleep(0)
