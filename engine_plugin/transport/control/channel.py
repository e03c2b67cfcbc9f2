"""Frames over one TCP connection: bounded reads, writes that never wait, an end that always comes."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from engine_plugin import protocol
from engine_plugin.protocol import ClientMessage, ServerMessage

FLUSH_S: Final = 0.5


class ChannelClosed(Exception):
    """The connection ended, in whatever way."""


class Channel:
    """One connection. A peer that does not read what we send is cut off at `send_limit_bytes`.

    Attributes:
        heard_at_s: loop time of the last whole frame.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, send_limit_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_limit_bytes = send_limit_bytes
        self._loop = asyncio.get_running_loop()
        self.heard_at_s = self._loop.time()
        peer = writer.get_extra_info("peername") or ("unknown", 0)
        self.remote_host = str(peer[0])

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; on a closed connection it is dropped."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(protocol.encode(message))
        if transport.get_write_buffer_size() > self._send_limit_bytes:
            transport.abort()

    async def from_client(self, limit_bytes: int) -> ClientMessage:
        """The consumer's next message. Raises ChannelClosed, FrameError."""
        return protocol.decode_client(await self._payload(limit_bytes))

    async def from_server(self, limit_bytes: int) -> ServerMessage:
        """The producer's next message. Raises ChannelClosed, FrameError."""
        return protocol.decode_server(await self._payload(limit_bytes))

    async def _payload(self, limit_bytes: int) -> bytes:
        try:
            header = await self._reader.readexactly(protocol.HEADER_BYTES)
            payload = await self._reader.readexactly(protocol.payload_bytes(header, limit_bytes))
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise ChannelClosed from exc
        self.heard_at_s = self._loop.time()
        return payload

    async def close(self) -> None:
        """Flush for at most `FLUSH_S`, then close."""
        self._writer.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    def abort(self) -> None:
        """Close without flushing."""
        self._writer.transport.abort()
