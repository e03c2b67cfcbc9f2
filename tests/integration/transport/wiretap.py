"""A TCP relay in front of a transport that keeps every byte, and can cut the line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engine_plugin.identity import Address


class Wiretap:
    """What went over the line, in both directions together and the client's part alone.

    Attributes:
        address: dial this instead of the target.
    """

    def __init__(self, target: Address) -> None:
        self.address: Address = ("127.0.0.1", 0)
        self.heard = bytearray()
        self.from_client = bytearray()
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        both = (
            self._copy(reader, far_writer, (self.heard, self.from_client)),
            self._copy(far_reader, writer, (self.heard,)),
        )
        await asyncio.gather(*both)
        self._writers -= {writer, far_writer}

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, into: tuple[bytearray, ...]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for kept in into:
                    kept += data
                writer.write(data)
        writer.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def wiretap(target: Address) -> AsyncIterator[Wiretap]:
    tap = Wiretap(target)
    server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
    tap.address = server.sockets[0].getsockname()[:2]
    try:
        yield tap
    finally:
        server.close()
        tap.cut()
        await server.wait_closed()
