"""A client that sees every byte and stays connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.integration.sidecar.doubles import WAIT_S
from tests.integration.sidecar.rig import COMPLETIONS, PORT, Rig, raw_post


@dataclass
class Client:
    """A raw connection that reads one answer at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[bytes, bytes]:
        """The next answer's head and body, by its content-length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            return head, await self.reader.readexactly(int(length or 0))

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(rig: Rig) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(rig.host, PORT)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def post_and_stay(body: bytes, *lines: str) -> bytes:
    """A request after which the connection stays open."""
    return raw_post(COMPLETIONS, body, *lines).replace(b"Connection: close\r\n", b"")
