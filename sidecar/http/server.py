"""A client's connection: one request after the other, answered in their order, every wait bounded.

state      what                                          its limit
HEAD       nothing, or half a head, is here              head limit; the first one runs from the connect
SERVING    a handler runs                                the handler's own; idle where the client takes none
REST       answered, but the request still arrives       `LINGER_S`; what comes is dropped
IDLE       between requests                              keep-alive limit
CLOSING    the last answer is on its way out             idle limit, or `LINGER_S` for the client to close

A client that leaves cancels its handler. What is not HTTP is answered once all before it has been.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import Any, Final, cast

from multidict import CIMultiDict

from sidecar.http.answer import Answer, reset
from sidecar.http.body import Body
from sidecar.http.message import CONTINUE, BadMessage, Framing, PeerGone, RequestHead, answer_bytes
from sidecar.http.reader import RequestReader
from sidecar.http.service import Request, Service

MAX_PIPELINED: Final = 128  # requests read ahead; more than that end the connection
LINGER_S: Final = 2.0

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """See the module's table."""

    HEAD = enum.auto()
    SERVING = enum.auto()
    REST = enum.auto()
    IDLE = enum.auto()
    CLOSING = enum.auto()


class ServerConnection(asyncio.Protocol):
    """Made by a listener's server for each client: an `AnswerChannel`, a `Flow`, and for `RequestEvents`."""

    transport: asyncio.Transport

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(self)
        self._state = State.HEAD
        self._since_s = self._loop.time()  # of the state
        self._arriving: Request | None = None
        self._serving: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[Request] = deque()
        self._fault: BadMessage | None = None  # answered when all before it is
        self._deaf = False  # what arrives is dropped
        self._body_held = self._paused = False
        self._congested_s = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._remote: str | None = None
        self.congested = False
        self.writes_from: Body | None = None

    # --- the transport's calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer: Any = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if isinstance(peer, tuple) else None
        self._service.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._service.connections.discard(self)
        self._enter(State.CLOSING)
        self._deaf = True
        self._queue.clear()
        if self._arriving is not None:
            self._arriving.body.fail(PeerGone())
        self._arriving = self._serving = None
        self._reader.release()
        if self.writes_from is not None:
            self.writes_from.discard()  # until the handler has noticed
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError())
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._state is State.IDLE:
            self._enter(State.HEAD)
        try:
            self._reader.feed(data)
        except BadMessage as fault:
            self._malformed(fault)
        if self._arriving is not None:
            self._arriving.body.flush()
        if self._reader.upgraded:
            self._deaf = True

    def pause_writing(self) -> None:
        self.congested = True
        self._congested_s = self._loop.time()
        if self.writes_from is not None:
            self.writes_from.hold()

    def resume_writing(self) -> None:
        self.congested = False
        if self.writes_from is not None:
            self.writes_from.release()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # --- the reader's events ---------------------------------------------------------------------

    def begin(self, head: RequestHead) -> None:
        """A head is here; its body may still be arriving."""
        has_body = head.framing is not Framing.NONE
        body = Body(self if has_body else None, self._continue if head.expects_continue else None)
        request = Request(head, body, Answer(head, self), self._remote)
        if self._serving is not None and len(self._queue) >= MAX_PIPELINED:
            raise BadMessage("too many requests at once")
        self._arriving = request
        if self._serving is None:
            self._serve(request)
            return
        self._queue.append(request)
        self._update_reading()

    def piece(self, data: bytes) -> None:
        if self._arriving is not None:
            self._arriving.body.feed(data)

    def end(self) -> None:
        arrived, self._arriving = self._arriving, None
        if arrived is not None and not arrived.body.ended:
            self._body_held = False
            arrived.body.end()
        if self._state is State.REST:
            self._next()

    def _malformed(self, fault: BadMessage) -> None:
        _log.warning("refused a request that is not HTTP: %s", fault)
        self._deaf = True
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            self._fault = fault
        else:  # its handler answers it
            arriving.answer.keep_alive = False
            arriving.body.fail(fault)
        if self._serving is None:
            self._next()

    # --- a flow's and a channel's side -------------------------------------------------------------

    def pause_reading(self) -> None:
        self._body_held = True
        self._update_reading()

    def resume_reading(self) -> None:
        self._body_held = False
        self._update_reading()

    async def drained(self) -> None:
        """Raises ConnectionError: the client has gone."""
        if self._state is State.CLOSING:
            raise ConnectionResetError
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    @property
    def may_be_kept(self) -> bool:
        return not (self._service.draining or self._owes_continue)

    @property
    def _owes_continue(self) -> bool:
        """Whether the client waits for a word before it sends its body: it may send it or not."""
        serving = self._serving
        return serving is not None and serving.head.expects_continue and serving.body.unwanted

    def _continue(self) -> None:
        unanswered = self._serving is not None and self._serving.answer.status is None
        if unanswered and not self.transport.is_closing():
            self.transport.write(CONTINUE)

    def _update_reading(self) -> None:
        """A client that sends more than is taken waits; one that sends the next request waits, too."""
        pause = self._body_held or bool(self._queue)
        if pause == self._paused or self.transport.is_closing():
            return
        self._paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # --- one request after the other ---------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self._serving = request
        self._enter(State.SERVING)
        self._task = self._loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._service.handler(request)
        finally:
            self._task = None
            if self._state is State.SERVING:
                self._served(request)

    def _served(self, request: Request) -> None:
        if not request.answer.ended:
            self._enter(State.CLOSING)
            request.answer.break_off()
        elif not request.body.ended:
            request.body.discard()
            if request.answer.keep_alive:
                self._enter(State.REST)
            else:
                self._close_gently()
        else:
            self._next()

    def _next(self) -> None:
        served, self._serving = self._serving, None
        if served is not None and not served.answer.keep_alive:
            self._close_gently() if self._deaf else self._close()
        elif self._queue:
            request = self._queue.popleft()
            self._update_reading()
            self._serve(request)
        elif self._fault is not None:
            self._refuse(self._fault)
        elif self._service.draining or self._deaf:
            self._close_gently()
        else:
            self._enter(State.HEAD if self._reader.in_message else State.IDLE)

    def _refuse(self, fault: BadMessage) -> None:
        body = self._service.refusal(fault)
        headers = CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))})
        headers["Connection"] = "close"
        self.transport.write(answer_bytes(fault.status, _REASONS[fault.status], headers) + body)
        self._close_gently()

    # --- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Close as soon as nothing is being served."""
        if self._state in (State.HEAD, State.IDLE):
            self._close()

    def cancel(self) -> asyncio.Task[None] | None:
        """End now; returns the handler to wait for."""
        if self._task is not None:
            self._task.cancel()
        else:
            self.transport.abort()
        return self._task

    def check(self, now_s: float) -> None:
        """Close if the state's limit has passed."""
        service, in_state_s = self._service, now_s - self._since_s
        if self.congested and now_s - self._congested_s > service.idle_s:
            reset(self.transport)
            return
        match self._state:
            case State.SERVING:
                return
            case State.HEAD:
                overdue = in_state_s > service.head_s
            case State.REST:
                overdue = in_state_s > LINGER_S
            case State.IDLE:
                overdue = in_state_s > service.keep_alive_s
            case State.CLOSING:
                unsent = self.transport.get_write_buffer_size() > 0
                overdue = in_state_s > (service.idle_s if unsent else LINGER_S)
        if not overdue:
            return
        if self._state is State.CLOSING:
            self.transport.abort()
        elif self._state is State.REST:
            self._close_gently()
        else:
            self._close()

    def _close(self) -> None:
        self._enter(State.CLOSING)
        self.transport.close()

    def _close_gently(self) -> None:
        """Let the client read its answer: closing a socket with unread bytes would reset it."""
        self._enter(State.CLOSING)
        self._deaf = True
        self._body_held = False
        self._queue.clear()
        if self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._update_reading()
        self.transport.write_eof()

    def _enter(self, state: State) -> None:
        self._state = state
        self._since_s = self._loop.time()


_REASONS: Final = {
    400: "Bad Request",
    417: "Expectation Failed",
    501: "Not Implemented",
    505: "HTTP Version Not Supported",
}
