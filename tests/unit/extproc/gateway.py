"""A gateway in FULL_DUPLEX_STREAMED mode as a kernel without I/O, to connect back to back with ours.

It says what Envoy 1.40 says and accepts what Envoy accepts: everything else is `Spurious`, which a real
Envoy answers with a 500.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from epp.extproc import events as ev
from epp.extproc import wire


class Spurious(AssertionError):
    """An answer that the gateway did not wait for."""


def cut(data: bytes, offsets: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(offset for offset in offsets if 0 < offset < len(data)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def head(
    *fields: tuple[str, str],
    method: str = "POST",
    path: str = "/v1/completions",
    request_id: str = "made-for-it",
    subset: frozenset[str] | None = None,
) -> ev.RequestHead:
    headers = ev.Headers.of((":method", method), (":path", path), *fields)
    return ev.RequestHead(headers, method, path, headers.first("x-request-id") or request_id, subset)


class Half:
    """What one direction of the exchange has become on the gateway's far side."""

    def __init__(self) -> None:
        self.headers = False
        self.body = b""
        self.pieces: list[bytes] = []
        self.ended = False
        self.trailers = False

    def on_headers(self, *, alone: bool) -> None:
        if self.headers:
            raise Spurious("headers twice")
        self.headers, self.ended = True, alone

    def on_piece(self, piece: ev.SendBodyPiece) -> None:
        if not self.headers or self.ended:
            raise Spurious(f"a body piece (headers {self.headers}, ended {self.ended})")
        if len(piece.body) > wire.MAX_BODY_CHUNK_BYTES:
            raise Spurious(f"a piece of {len(piece.body)} bytes")
        self.body += piece.body
        self.pieces.append(piece.body)
        self.ended = piece.end_of_stream

    def on_trailers(self) -> None:
        if not self.headers or self.ended:
            raise Spurious("trailers after the end")
        self.ended = self.trailers = True


class Gateway:
    """One exchange. `say` gives the next event of a direction, `take` accepts one action."""

    def __init__(
        self,
        request: Sequence[bytes],
        response: Sequence[bytes],
        *,
        request_trailers: bool = False,
        response_trailers: bool = False,
        content_type: str = "application/json",
        repeated_end: bytes | None = None,
    ) -> None:
        self.upstream, self.client = Half(), Half()
        self.destination: str | None = None
        self.edit: ev.HeaderEdit | None = None
        self._request_alone = not request and not request_trailers
        self._response_alone = not response and not response_trailers
        self._request: deque[ev.Event] = deque([ev.RequestHeaders(head(), self._request_alone)])
        for index, part in enumerate(request):
            last = index == len(request) - 1 and not request_trailers
            self._request.append(ev.RequestBody(part, last))
        if request_trailers:
            self._request.append(ev.RequestTrailers())
        elif repeated_end is not None and request:
            self._request.append(ev.RequestBody(repeated_end, True))
        headers = ev.Headers.of((":status", "200"), ("content-type", content_type))
        self._response: deque[ev.Event] = deque([ev.ResponseHeaders(headers, self._response_alone)])
        for index, part in enumerate(response):
            last = index == len(response) - 1 and not response_trailers
            self._response.append(ev.ResponseBody(part, last))
        if response_trailers:
            self._response.append(ev.ResponseTrailers())

    def can_say(self, direction: ev.Direction) -> bool:
        if direction is ev.Direction.REQUEST:
            return bool(self._request)
        return bool(self._response) and self.upstream.ended  # an upstream answers whole requests

    def say(self, direction: ev.Direction) -> ev.Event:
        return (self._request if direction is ev.Direction.REQUEST else self._response).popleft()

    def take(self, action: ev.Action) -> None:
        match action:
            case ev.SendRequestHeaders(destination, edit):
                self.destination, self.edit = destination, edit
                self.upstream.on_headers(alone=self._request_alone)
            case ev.SendResponseHeaders():
                self.client.on_headers(alone=self._response_alone)
            case ev.SendBodyPiece(direction):
                half = self.upstream if direction is ev.Direction.REQUEST else self.client
                half.on_piece(action)
            case ev.SendTrailers(direction):
                half = self.upstream if direction is ev.Direction.REQUEST else self.client
                half.on_trailers()
            case _:
                raise Spurious(str(action))
