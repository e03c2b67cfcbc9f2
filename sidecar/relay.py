"""An engine's answer on its way to a client.

Every piece is written as it arrives; nothing is unpacked, joined or held (an answer whose usage has to
be corrected: `answer_edit`). If the engine breaks off
after the answer has begun, the client's connection is closed before the end of the body's framing,
so that the client sees a broken answer and never a complete one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from multidict import CIMultiDict

from sidecar.answer_edit import Edit, UsageEdit, UsageWatch, edit_kind
from sidecar.errors import StreamBroken, UpstreamDied, UpstreamTimeout
from sidecar.headers import response_headers
from sidecar.http.answer import Answer
from sidecar.http.client import Received
from sidecar.http.message import HttpFault, PeerIdle

_MAX_DOCUMENT_BYTES: Final = 32 << 20  # of an answer that is corrected


async def relay(
    received: Received, client: Answer, edit: UsageEdit | UsageWatch | None = None, first: bytes = b""
) -> None:
    """Pass an engine's answer through; `first` was read from its body already.

    With `edit`, an answer in which usage can be read is corrected, or only read, on the way.

    Raises:
        UpstreamError: the engine broke off a document before anything had reached the client.
        StreamBroken: the engine broke off, or nothing moved for the idle time.
        ConnectionError: the client has gone.
    """
    if isinstance(edit, UsageWatch):
        await _pass(received, client, first, edit if edit.reads(received.status, received.headers) else None)
        return
    match edit_kind(received.status, received.headers) if edit is not None else None:
        case Edit.EVENTS if edit is not None:
            await _edit_events(received, client, edit, first)
        case Edit.DOCUMENT if edit is not None:
            await _edit_document(received, client, edit, first)
        case _:
            await _pass(received, client, first)


async def _pass(received: Received, client: Answer, first: bytes, watch: UsageWatch | None = None) -> None:
    _begin(received, client, response_headers(received.headers))
    if first:
        client.write(first)
        if watch is not None:
            watch.saw(first)
    try:
        await client.pour(received.body, None if watch is None else watch.saw)
    except HttpFault as fault:
        client.break_off()
        raise _broken(fault) from fault
    if watch is not None:
        watch.ended()


async def _edit_events(received: Received, client: Answer, edit: UsageEdit, first: bytes) -> None:
    headers = response_headers(received.headers)
    headers.popall("Content-Length", None)
    _begin(received, client, headers)
    client.flush()
    try:
        async for piece in edit.events(_pieces(received, first)):
            client.write(piece)
            client.flush()
            await client.drained()
    except HttpFault as fault:
        client.break_off()
        raise _broken(fault) from fault
    client.end()


async def _edit_document(received: Received, client: Answer, edit: UsageEdit, first: bytes) -> None:
    """Hold a JSON answer until it is whole (engines send it at once); a too large one passes."""
    held = bytearray()
    try:
        async for piece in _pieces(received, first):
            held += piece
            if len(held) > _MAX_DOCUMENT_BYTES:
                await _pass(received, client, bytes(held))
                return
    except PeerIdle as fault:
        raise UpstreamTimeout("No whole answer in time") from fault
    except HttpFault as fault:
        raise UpstreamDied("The decode endpoint broke off its answer") from fault
    send(
        client,
        received.status,
        received.headers,
        await edit.document(bytes(held)),
        received.head.reason,
    )


def send(
    client: Answer, status: int, headers: CIMultiDict[str], body: bytes, reason: str | None = None
) -> None:
    """An engine's answer that is in memory whole."""
    client.whole(status, "" if reason is None else reason, response_headers(headers), body)


def _begin(received: Received, client: Answer, headers: CIMultiDict[str]) -> None:
    client.begin(received.status, received.head.reason, headers)


def _broken(fault: HttpFault) -> StreamBroken:
    return StreamBroken(f"the engine broke off its answer: {type(fault).__name__}")


async def _pieces(received: Received, first: bytes) -> AsyncIterator[bytes]:
    if first:
        yield first
    while piece := await received.body.read():
        yield piece
