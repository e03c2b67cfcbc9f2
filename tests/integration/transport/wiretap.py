"""A TCP relay in front of a transport that keeps every byte, and can cut the line or make it mute."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from engine_plugin.identity import Address


class Wiretap:
    """What went over the line, in both directions together and the client's part alone.

    Attributes:
        address: dial this instead of the target.
        target: where new connections lead.
        open: cleared, nothing passes and nothing ends.
    """

    def __init__(self, target: Address) -> None:
        self.address: Address = ("127.0.0.1", 0)
        self.heard = bytearray()
        self.from_client = bytearray()
        self.target = target
        self.open = asyncio.Event()
        self.open.set()
        self._trap: tuple[int, Callable[[], None]] | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
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
                await self.open.wait()
                for kept in into:
                    kept += data
                writer.write(data)
                self._spring()
        writer.close()

    def after(self, count: int, act: Callable[[], None]) -> None:
        """Do something once `count` more bytes have come from clients."""
        self._trap = (len(self.from_client) + count, act)
        self._spring()

    def disarm(self) -> None:
        """Undo `after`."""
        self._trap = None

    def _spring(self) -> None:
        if self._trap is not None and len(self.from_client) >= self._trap[0]:
            act = self._trap[1]
            self._trap = None
            act()

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
        tap.open.set()
        tap.cut()
        await server.wait_closed()
