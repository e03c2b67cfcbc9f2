"""Bytes in, events out: llhttp in its strict mode, and the limits that it does not have.

llhttp refuses what request smuggling is made of: a length beside transfer-encoding, two lengths, bare line
feeds, folded lines, blanks before a colon, chunk sizes that are not plain hexadecimal. Here: sizes, counts,
versions, transfer codings other than `chunked`, and a missing or second Host. Trailers are dropped. No I/O.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import httptools
from multidict import CIMultiDict

from sidecar.http.message import ENCODING, ERRORS, AnswerHead, BadMessage, Framing, RequestHead

MAX_HEAD_BYTES: Final = 128 << 10  # of a head, of trailers, or of anything else that is not body
MAX_FIELDS: Final = 512
_TOO_LARGE: Final = "the head is too large"
_BODILESS: Final = frozenset({204, 304})


class RequestEvents(Protocol):
    """Who takes requests. A `BadMessage` raised by one of these ends the reading."""

    def begin(self, head: RequestHead) -> None: ...

    def piece(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class AnswerEvents(Protocol):
    """Who takes answers."""

    def begin(self, head: AnswerHead) -> None: ...

    def piece(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class _Reader:
    """What both directions share. `on_*` are llhttp's callbacks."""

    _parser: Any
    _events: Any

    def __init__(self) -> None:
        self._fields: list[tuple[str, str]] = []
        self._field_count = 0
        self._head_bytes = 0
        self._quiet_bytes = 0  # since the last piece of body, or end of a message

    def feed(self, data: bytes) -> None:
        """Take what has arrived.

        Raises:
            BadMessage: this connection can say nothing more.
        """
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.upgrade()
        except httptools.HttpParserError as error:
            raise _fault(error) from None
        if self._quiet_bytes > MAX_HEAD_BYTES:
            raise BadMessage(_TOO_LARGE)

    def release(self) -> None:
        """The connection has ended: let go of it, so that nobody has to look for cycles."""
        del self._parser, self._events

    def upgrade(self) -> None:
        """What follows is another protocol."""
        raise NotImplementedError

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_count += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._field_count > MAX_FIELDS or self._head_bytes > MAX_HEAD_BYTES:
            raise BadMessage(_TOO_LARGE)
        self._fields.append((name.decode(ENCODING, ERRORS), value.decode(ENCODING, ERRORS)))

    def _take_fields(self) -> CIMultiDict[str]:
        headers = CIMultiDict(self._fields)
        self._fields.clear()
        return headers

    def _restart(self) -> None:
        self._fields.clear()  # trailers
        self._field_count = self._head_bytes = 0


class RequestReader(_Reader):
    """Of one client's connection."""

    def __init__(self, events: RequestEvents) -> None:
        super().__init__()
        self._events = events
        self._target = b""
        self._parser = httptools.HttpRequestParser(self)
        self.in_message = False  # from the first byte of a head to the last of its body
        self.upgraded = False

    def upgrade(self) -> None:
        """The request before it is served as any other; what follows is never read."""
        self.upgraded = True

    def on_message_begin(self) -> None:
        self.in_message = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > MAX_HEAD_BYTES:
            raise BadMessage(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        headers = self._take_fields()
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadMessage("the version is not HTTP/1.1 or HTTP/1.0", 505)
        is_1_1 = version == "1.1"
        hosts = len(headers.getall("Host", ()))
        if hosts > 1 or (is_1_1 and not hosts):
            raise BadMessage("the request has no Host, or more than one")
        framing = _request_framing(headers, is_1_1)
        expects = headers.get("Expect")
        if expects is not None and expects.lower() != "100-continue":
            raise BadMessage("an expectation that is not known", 417)
        head = RequestHead(
            self._parser.get_method().decode("ascii"),
            self._target.decode(ENCODING, ERRORS),
            is_1_1,
            headers,
            framing,
            int(headers["Content-Length"]) if framing is Framing.LENGTH else None,
            is_1_1 and self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            expects is not None and is_1_1 and framing is not Framing.NONE,
        )
        self._events.begin(head)

    def on_body(self, data: bytes) -> None:
        self._quiet_bytes = 0
        self._events.piece(data)

    def on_message_complete(self) -> None:
        self.in_message = False
        self._quiet_bytes = 0
        self._target = b""
        self._restart()
        self._events.end()


class AnswerReader(_Reader):
    """Of one connection to an engine. `head_only`: the next answer is one to a HEAD."""

    def __init__(self, events: AnswerEvents) -> None:
        super().__init__()
        self._events = events
        self._reason = b""
        self._interim = False
        self._parser = httptools.HttpResponseParser(self)
        self.head_only = False

    def upgrade(self) -> None:
        raise BadMessage("the protocol was changed")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_headers_complete(self) -> None:
        headers = self._take_fields()
        status = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            return
        framing = Framing.NONE if self.head_only or status in _BODILESS else _answer_framing(headers)
        self._events.begin(AnswerHead(status, self._reason.decode(ENCODING, ERRORS), headers, framing))
        if self.head_only:
            self._events.end()

    def on_body(self, data: bytes) -> None:
        self._quiet_bytes = 0
        if not self.head_only:
            self._events.piece(data)

    def on_message_complete(self) -> None:
        interim, self._interim = self._interim, False
        self._reason = b""
        self._restart()
        if not interim:
            self._quiet_bytes = 0
            if not self.head_only:
                self._events.end()

    @property
    def keep_alive(self) -> bool:
        """Whether another call may follow: llhttp cannot be told that an answer to HEAD has no body."""
        return not self.head_only and bool(self._parser.should_keep_alive())


def _request_framing(headers: CIMultiDict[str], is_1_1: bool) -> Framing:
    codings = headers.getall("Transfer-Encoding", None)
    if codings is None:
        length = headers.get("Content-Length")
        return Framing.NONE if length is None or int(length) == 0 else Framing.LENGTH
    if not is_1_1:
        raise BadMessage("transfer-encoding in HTTP/1.0")
    if len(codings) != 1 or codings[0].lower() != "chunked":
        raise BadMessage("a transfer coding that is not known", 501)
    return Framing.CHUNKED


def _answer_framing(headers: CIMultiDict[str]) -> Framing:
    codings = headers.getall("Transfer-Encoding", None)
    if codings is None:
        return Framing.LENGTH if "Content-Length" in headers else Framing.CLOSE
    if len(codings) != 1 or codings[0].lower() != "chunked":
        raise BadMessage("a transfer coding that is not known")
    return Framing.CHUNKED


def _fault(error: httptools.HttpParserError) -> BadMessage:
    """llhttp's own texts are fixed ones; what a callback raised is passed on, ours or not."""
    if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ is not None:
        if isinstance(error.__context__, BadMessage):
            return error.__context__
        raise error.__context__
    return BadMessage(str(error))
