"""The server side: one answer to one client, started at most once.

Every piece is written as it arrives; nothing is unpacked, joined or held (an answer whose usage has to
be corrected: `answer_edit`). If the engine breaks off
after the answer has begun, the client's connection is closed before the end of the body's framing,
so that the client sees a broken answer and never a complete one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, MultiMapping

from sidecar.answer_edit import AnswerEdit, Edit
from sidecar.errors import StreamBroken, UpstreamDied, UpstreamTimeout
from sidecar.headers import response_headers

_log = logging.getLogger(__name__)

_OWN_HEADERS: Final = web.ResponseKey("sidecar.own_headers", frozenset[str])
_MAX_DOCUMENT_BYTES: Final = 32 << 20  # of an answer that is corrected
_LIBRARY_HEADERS: Final = ("Server", "Date", "Content-Type")  # the library adds them where absent


class ClientStream:
    """The client's half of an exchange. `started` once a status line was, or may have been, sent."""

    def __init__(self, request: web.Request, *, idle_timeout_s: float) -> None:
        self._request = request
        self._idle_timeout_s = idle_timeout_s
        self.response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        return self.response is not None

    async def relay(
        self, answer: aiohttp.ClientResponse, first: bytes | None = None, edit: AnswerEdit | None = None
    ) -> None:
        """Pass an engine's answer through; `first` was read from its body already.

        With `edit`, an answer that it applies to is corrected on the way.

        Raises:
            UpstreamError: the engine broke off a document before anything had reached the client.
            StreamBroken: the engine broke off, or nothing moved for the idle time.
            ConnectionError: the client has gone.
        """
        pieces = _pieces(answer, first)
        kind = edit.kind(answer.status, answer.headers) if edit is not None else None
        if edit is None or kind is None:
            await self._pass(answer, pieces)
        elif kind is not Edit.DOCUMENT:
            await self._pass(answer, edit.events(pieces), keep_length=kind is Edit.WATCH)
        else:
            await self._edit_document(answer, pieces, edit)

    async def _pass(
        self, answer: aiohttp.ClientResponse, pieces: AsyncIterator[bytes], *, keep_length: bool = True
    ) -> None:
        response = self._begin(answer.status, answer.reason, answer.headers)
        if not keep_length:
            response.headers.popall("Content-Length", None)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._idle_timeout_s) as deadline:
                await response.prepare(self._request)
                async for piece in pieces:
                    await response.write(piece)
                    deadline.reschedule(loop.time() + self._idle_timeout_s)
                await response.write_eof()
        except TimeoutError as error:
            self.break_off()
            raise StreamBroken(f"no byte moved for {self._idle_timeout_s:g} s") from error
        except StreamBroken:
            self.break_off()
            raise

    async def _edit_document(
        self, answer: aiohttp.ClientResponse, pieces: AsyncIterator[bytes], edit: AnswerEdit
    ) -> None:
        """Hold a JSON answer until it is whole (engines send it at once); a too large one passes."""
        held = bytearray()
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                async for piece in pieces:
                    held += piece
                    if len(held) > _MAX_DOCUMENT_BYTES:
                        break
        except TimeoutError as error:
            raise UpstreamTimeout(f"No whole answer in {self._idle_timeout_s:g} s") from error
        except StreamBroken as error:
            raise UpstreamDied("The decode endpoint broke off its answer") from error
        if len(held) > _MAX_DOCUMENT_BYTES:
            await self._pass(answer, _chained(bytes(held), pieces))
        else:
            await self.send(answer.status, answer.headers, await edit.document(bytes(held)), answer.reason)

    async def send(
        self, status: int, headers: MultiMapping[str], body: bytes, reason: str | None = None
    ) -> None:
        """An answer that is in memory whole."""
        response = self._begin(status, reason, headers)
        response.headers["Content-Length"] = str(len(body))
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await response.prepare(self._request)
                await response.write_eof(body)
        except TimeoutError as error:
            self.break_off()
            raise StreamBroken(f"the client took no byte for {self._idle_timeout_s:g} s") from error

    def break_off(self) -> None:
        """End the client's connection so that the answer cannot pass for complete."""
        transport = self._request.transport
        if transport is None:
            return
        framed = self.response is not None and (
            self._request.version >= aiohttp.HttpVersion11 or "Content-Length" in self.response.headers
        )
        if framed:
            transport.close()  # what was written still arrives
        else:
            _reset(transport)  # the end of the connection would be the end of the body

    def _begin(self, status: int, reason: str | None, incoming: MultiMapping[str]) -> web.StreamResponse:
        assert self.response is None, "an answer was started twice"
        headers: CIMultiDict[str] = response_headers(incoming)
        response = web.StreamResponse(status=status, reason=reason, headers=headers)
        response[_OWN_HEADERS] = frozenset(name for name in _LIBRARY_HEADERS if name in headers)
        self.response = response
        return response


def _reset(transport: asyncio.Transport) -> None:
    """Close with RST instead of FIN."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def strip_library_headers(_: web.Request, response: web.StreamResponse) -> None:
    """`on_response_prepare`: take back the headers the engine did not send."""
    own = response.get(_OWN_HEADERS)
    if own is None:
        return
    for name in _LIBRARY_HEADERS:
        if name not in own:
            response.headers.popall(name, None)


async def _pieces(answer: aiohttp.ClientResponse, first: bytes | None) -> AsyncIterator[bytes]:
    if first:
        yield first
    try:
        while piece := await answer.content.readany():
            yield piece
    except (aiohttp.ClientError, ConnectionError) as error:
        raise StreamBroken(f"the engine broke off its answer: {type(error).__name__}") from error


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
