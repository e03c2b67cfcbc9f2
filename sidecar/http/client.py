"""A connection to an engine: one call at a time, its request sent and its answer read at once."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from multidict import CIMultiDict

from sidecar.http.body import Body
from sidecar.http.message import (
    LAST_CHUNK,
    AnswerHead,
    BadMessage,
    Framing,
    HttpFault,
    PeerGone,
    PeerIdle,
    UploadBroken,
    chunk,
)
from sidecar.http.reader import AnswerReader


class Owner(Protocol):
    """Who keeps connections between calls."""

    def give_back(self, connection: ClientConnection) -> None: ...

    def lost(self, connection: ClientConnection) -> None: ...


class Received:
    """An answer whose head is here. `close` it in any case: an unfinished one ends its connection."""

    __slots__ = ("_connection", "body", "head")

    def __init__(self, head: AnswerHead, body: Body, connection: ClientConnection) -> None:
        self.head = head
        self.body = body
        self._connection = connection

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def headers(self) -> CIMultiDict[str]:
        return self.head.headers

    def close(self) -> None:
        if not self.body.ended:
            self._connection.abort()


class ClientConnection(asyncio.Protocol):
    """Takes the `AnswerEvents` of its reader. `moved_s`: when a byte last went either way."""

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = AnswerReader(self)
        self._answered: asyncio.Future[Received] | None = None  # while a call is under way
        self._body: Body | None = None
        self._framing = Framing.NONE
        self._upload: _Upload | None = None
        self._congested = False
        self.moved_s = self._loop.time()
        self.heard = False  # of the present call: a byte of its answer has come
        self.lost = False

    # --- one call ----------------------------------------------------------------------------------

    async def call(self, head: bytes, body: bytes | Body | None, *, is_head: bool, chunked: bool) -> Received:
        """Send a request; its answer's head. `chunked`: how a `Body` goes out.

        Raises:
            HttpFault: `PeerGone`, `PeerIdle`, `BadMessage`, or `UploadBroken` by `body`.
        """
        if self.lost or self.transport.is_closing():
            raise PeerGone
        answered: asyncio.Future[Received] = self._loop.create_future()
        self._answered = answered
        self._reader.head_only = is_head
        self.heard = False
        self.moved_s = self._loop.time()
        if isinstance(body, bytes) and body:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head)
            if isinstance(body, Body):
                self._upload = _Upload(self, body, chunked=chunked)
                body.pipe(self._upload, congested=self._congested)
        try:
            return await answered
        except BaseException:
            self.abort()
            raise

    def check(self, now_s: float, idle_s: float) -> None:
        """Give up a call in which nothing has moved."""
        if self._answered is not None and now_s - self.moved_s > idle_s:
            self.fail(PeerIdle())

    def abort(self) -> None:
        """End the connection at once."""
        self._stop_upload()
        self.transport.abort()

    def fail(self, fault: HttpFault) -> None:
        """End the call, and the connection with it."""
        self._stop_upload()
        answered, self._answered = self._answered, None
        body, self._body = self._body, None
        if body is not None:
            body.fail(fault)
        elif answered is not None and not answered.done():
            answered.set_exception(fault)
        self.transport.abort()

    # --- the transport's calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._owner.lost(self)
        if self._body is not None and self._framing is Framing.CLOSE and error is None:
            self.end()
        elif self._answered is not None:
            self.fail(PeerGone())
        self._reader.release()

    def data_received(self, data: bytes) -> None:
        if self._answered is None:
            self.transport.abort()  # nobody has asked
            return
        self.heard = True
        self.moved_s = self._loop.time()
        try:
            self._reader.feed(data)
        except BadMessage as fault:
            self.fail(fault)
        if self._body is not None:
            self._body.flush()

    def pause_writing(self) -> None:
        self._congested = True
        if self._upload is not None:
            self._upload.body.hold()

    def resume_writing(self) -> None:
        self._congested = False
        self.moved_s = self._loop.time()
        if self._upload is not None:
            self._upload.body.release()

    # --- the flow of the answer's body -------------------------------------------------------------

    def pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # --- the reader's events -----------------------------------------------------------------------

    def begin(self, head: AnswerHead) -> None:
        if self._answered is None or self._body is not None:
            raise BadMessage("an answer that nobody asked for")
        self._framing = head.framing
        self._body = Body(self)
        if not self._answered.done():
            self._answered.set_result(Received(head, self._body, self))

    def piece(self, data: bytes) -> None:
        if self._body is not None:
            self._body.feed(data)

    def end(self) -> None:
        """The answer is complete: the connection can serve another call, if both sides mean to."""
        body, self._body = self._body, None
        self._answered = None
        reusable = not self.lost and self._upload is None and self._reader.keep_alive
        self._stop_upload()
        if body is not None:
            body.release()
            body.end()
        if reusable:
            self._owner.give_back(self)
        else:
            self.transport.abort()

    # --- the request's body, where it is passed on ---------------------------------------------------

    def uploaded(self) -> None:
        self._upload = None

    def _stop_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.body.discard()


class _Upload:
    """The sink a request's body is piped into."""

    __slots__ = ("_chunked", "_connection", "body")

    def __init__(self, connection: ClientConnection, body: Body, *, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked
        self.body = body

    def write(self, piece: bytes) -> None:
        connection = self._connection
        connection.moved_s = asyncio.get_running_loop().time()
        connection.transport.write(chunk(piece) if self._chunked else piece)

    def flush(self) -> None:
        """Nothing is kept here."""

    def end(self) -> None:
        if self._chunked:
            self._connection.transport.write(LAST_CHUNK)
        self._connection.uploaded()

    def fail(self, fault: HttpFault) -> None:
        self._connection.fail(UploadBroken(str(fault)))
