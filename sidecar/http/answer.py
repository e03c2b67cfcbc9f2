"""The answer to one request: its framing, its end, or a break that no client takes for the end.

An answer is begun at most once. With a content-length it is framed by that, to HTTP/1.1 it is chunked
otherwise, and to HTTP/1.0 it ends with the connection. Answers to HEAD, 204 and 304 have no body.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

from multidict import CIMultiDict

from sidecar.http.body import Body
from sidecar.http.message import LAST_CHUNK, Framing, HttpFault, RequestHead, answer_bytes

_NO_CONTENT: Final = 204
_BODILESS: Final = frozenset({_NO_CONTENT, 304})
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class AnswerChannel(Protocol):
    """The client's connection, as an answer sees it."""

    @property
    def transport(self) -> asyncio.Transport: ...

    congested: bool  # the client takes bytes more slowly than they are written
    writes_from: Body | None  # to be held while it is

    @property
    def may_be_kept(self) -> bool:
        """Whether another request may follow on this connection."""

    async def drained(self) -> None:
        """Until it is no longer congested."""


class Answer:
    """What a client gets. `begin`, `write` and `end` gather bytes, which `flush` sends at once."""

    __slots__ = ("_channel", "_framing", "_head", "_left_bytes", "_out", "ended", "keep_alive", "status")

    def __init__(self, head: RequestHead, channel: AnswerChannel) -> None:
        self._head = head
        self._channel = channel
        self._framing = Framing.NONE
        self._left_bytes = 0
        self._out: list[bytes] = []
        self.keep_alive = head.keep_alive
        self.status: int | None = None  # once the answer was begun
        self.ended = False

    def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """The head. Framing fields are added to `headers` here; a content-length is believed."""
        assert self.status is None, "an answer was started twice"
        self._framing = self._framing_of(status, headers)
        if self._framing is Framing.CHUNKED:
            headers["Transfer-Encoding"] = "chunked"
        elif status == _NO_CONTENT:
            headers.popall("Content-Length", None)
        self.keep_alive &= self._framing is not Framing.CLOSE and self._channel.may_be_kept
        if not self.keep_alive:
            headers["Connection"] = "close"
        self._out.append(answer_bytes(status, reason, headers))
        self.status = status

    def write(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._framing is Framing.CHUNKED:
            if piece:
                self._out += (b"%x\r\n" % len(piece), piece, b"\r\n")
        elif self._framing is not Framing.NONE:
            self._left_bytes -= len(piece)
            self._out.append(piece)

    def flush(self) -> None:
        """Send what was gathered; nothing to a client that has gone: its handler is about to be cancelled."""
        out, transport = self._out, self._channel.transport
        if out and not transport.is_closing():
            transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def end(self) -> None:
        """The body is complete, and sent. One that is shorter or longer than was said is broken off."""
        if self._framing is Framing.LENGTH and self._left_bytes:
            self.break_off()
            return
        self.ended = True
        if self._framing is Framing.CHUNKED:
            self._out.append(LAST_CHUNK)
        self.flush()

    def whole(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """An answer that is here whole."""
        if status not in _BODILESS:
            headers["Content-Length"] = str(len(body))
        self.begin(status, reason, headers)
        self.write(body)
        self.end()

    async def pour(self, body: Body, tap: Callable[[bytes], None] | None = None) -> None:
        """Pass on the rest of `body` as it arrives, and end. `tap` sees every piece.

        Raises:
            HttpFault: it broke; the answer is not ended.
        """
        pouring = _Pouring(self, tap)
        channel = self._channel
        channel.writes_from = body
        try:
            body.pipe(pouring, congested=channel.congested)
            if not self.ended:
                self.flush()
                await pouring.done
        finally:
            channel.writes_from = None
            body.discard()

    async def drained(self) -> None:
        """Until the client has taken enough for more to be written."""
        if self._channel.congested:
            await self._channel.drained()

    def break_off(self) -> None:
        """End the client's connection so that the answer cannot pass for complete."""
        self.flush()
        transport = self._channel.transport
        if self.status is not None and self._framing is Framing.CLOSE:
            reset(transport)  # the end of the connection would be the end of the body
        else:
            transport.close()  # what was written still arrives

    def _framing_of(self, status: int, headers: CIMultiDict[str]) -> Framing:
        if self._head.method == "HEAD" or status in _BODILESS:
            return Framing.NONE
        length = headers.get("Content-Length")
        if length is not None:
            self._left_bytes = int(length)
            return Framing.LENGTH
        return Framing.CHUNKED if self._head.is_1_1 else Framing.CLOSE


class _Pouring:
    """The sink of `Answer.pour`."""

    __slots__ = ("_tap", "_write", "answer", "done")

    def __init__(self, answer: Answer, tap: Callable[[bytes], None] | None) -> None:
        self.answer = answer
        self._write = answer.write
        self._tap = tap
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, piece: bytes) -> None:
        self._write(piece)
        if self._tap is not None:
            self._tap(piece)

    def flush(self) -> None:
        self.answer.flush()

    def end(self) -> None:
        self.answer.end()
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, fault: HttpFault) -> None:
        if not self.done.done():
            self.done.set_exception(fault)


def reset(transport: asyncio.Transport) -> None:
    """Close with RST instead of FIN."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
