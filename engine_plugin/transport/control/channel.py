"""Frames over one TCP connection: bounded reads, writes that never wait, an end that always comes."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from typing import Any, Final

import msgspec

from engine_plugin import protocol
from engine_plugin.identity import Address
from engine_plugin.protocol import ClientMessage, FrameError, ServerMessage

FLUSH_S: Final = 0.5
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")  # alert, handshake; as a frame's length beyond every limit


class ChannelClosed(Exception):
    """The connection ended, in whatever way."""


class SpeaksTls(FrameError):
    """We are insecure by name, and the other side has a peer key."""


class Channel:
    """One connection, over TLS unless both sides are insecure. A peer that does not read what we send is
    cut off at `send_limit_bytes`. Create with `open`.

    Attributes:
        heard_at_s: loop time of the last whole frame.
        remote_host: the address it comes from; with a key also one that has proved to hold it.
        certificate: what it has proved that with, DER; None over plain text.
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
        tls = writer.get_extra_info("ssl_object")
        self.certificate: bytes | None = None if tls is None else tls.getpeercert(binary_form=True)

    @classmethod
    async def open(
        cls, sock: socket.socket, tls: ssl.SSLContext | None, *, server_side: bool, send_limit_bytes: int
    ) -> Channel:
        """Over a connected socket, which it takes over; returns once TLS has authenticated the other side (as
        far as TLS 1.3 tells a client). The caller bounds the wait.

        Raises:
            ssl.SSLError: the other side has not our key, or speaks no TLS.
            OSError: it is gone.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        streams = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport: Any
        try:
            # asyncio does it only for sockets that say they are TCP, and accepted ones do not
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if server_side:
                transport, _ = await loop.connect_accepted_socket(lambda: streams, sock, ssl=tls)
            else:
                name = None if tls is None else ""
                transport, _ = await loop.create_connection(
                    lambda: streams, sock=sock, ssl=tls, server_hostname=name
                )
        except BaseException:
            sock.close()
            raise
        writer = asyncio.StreamWriter(transport, streams, reader, loop)
        return cls(reader, writer, send_limit_bytes=send_limit_bytes)

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
            if header[:2] in _TLS_RECORDS:
                raise SpeaksTls("the other side has a peer key, this one none")
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


async def dial(source: Address, local_host: str) -> socket.socket:
    """A socket connected to `source`, from our own address where it has a say. Raises OSError."""
    loop = asyncio.get_running_loop()
    error = OSError("the name has no address")
    for family, kind, number, _, address in await loop.getaddrinfo(*source, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, number)
        sock.setblocking(False)
        try:
            if speaks_from(local_host, str(address[0])):
                sock.bind((local_host, 0))
            await loop.sock_connect(sock, address)
        except OSError as exc:
            sock.close()
            error = exc
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


def speaks_from(local_host: str, remote_host: str) -> bool:
    """Whether connections to `remote_host` shall come from `local_host`, the address we listen on: limits
    are kept by address, and several engines of one machine have one each. Not from a wildcard or a name, and
    not from the loopback to elsewhere.
    """
    try:
        local, remote = ipaddress.ip_address(local_host), ipaddress.ip_address(remote_host.partition("%")[0])
    except ValueError:
        return False
    return (
        local.version == remote.version
        and not local.is_unspecified
        and not local.is_link_local
        and local.is_loopback == remote.is_loopback
    )
