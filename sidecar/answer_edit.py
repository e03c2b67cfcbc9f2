"""Corrects, or only reads, cached tokens in an answer while it passes; the rules are in `usage`.

A stream's complete lines go on at once, whatever is read on the side; only a line whose end has not
arrived is held, and no client can use half a line. A line over the limit passes unread. The prefill
leg's figure is waited for at most once, for a bounded time, and only when a line needs it.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from multidict import MultiMapping

from sidecar.kv_params import Api
from sidecar.usage import Usage, cached_mark, corrected, mentions_cached, read_usage

MAX_LINE_BYTES: Final = 4 << 20
MAX_WATCHED_BYTES: Final = 1 << 20  # of one line or document; a longer one is not looked at
_IN_THREAD_BYTES: Final = 64 << 10  # larger documents would hold up the event loop
_LINE: Final = re.compile(rb"[^\r\n]*[\r\n]+")
_DATA: Final = b"data:"


class Edit(enum.Enum):
    """How an answer passes."""

    EVENTS = "events"  # a stream, corrected line by line
    DOCUMENT = "document"  # held until it is whole, then corrected


def edit_kind(status: int, headers: MultiMapping[str]) -> Edit | None:
    """EVENTS or DOCUMENT, or None for an answer in which no usage can be read."""
    if status != 200 or headers.get("Content-Encoding", "identity").lower() != "identity":
        return None
    content_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type == "text/event-stream":
        return Edit.EVENTS
    return Edit.DOCUMENT if content_type == "application/json" else None


class UsageEdit:
    """One answer of one split request. `prefill_usage` is awaited at most once."""

    def __init__(self, api: Api, prefill_usage: Callable[[], Awaitable[Usage | None]]) -> None:
        self._api = api
        self._prefill_usage = prefill_usage
        self._known = False
        self._prefill: Usage | None = None
        self.corrections = 0

    async def document(self, body: bytes) -> bytes:
        """A whole JSON answer."""
        if not mentions_cached(self._api, body):
            return body
        prefill = await self._usage()
        if len(body) > _IN_THREAD_BYTES:
            edited = await asyncio.to_thread(corrected, self._api, body, prefill)
        else:
            edited = corrected(self._api, body, prefill)
        self.corrections += edited is not body
        return edited

    async def events(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A stream of server-sent events, in the pieces in which it can go on."""
        held = bytearray()  # a line without its end
        passing = False  # inside a line over the limit
        try:
            async for piece in pieces:
                end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
                if passing:
                    passing = not end
                    yield piece  # the rest of the long line, and, seldom, whole lines with it
                    continue
                if not end:
                    held += piece
                    if len(held) > MAX_LINE_BYTES:
                        passing = True
                        yield _take(held)
                    continue
                lines = _take(held) + piece[:end] if held else piece[:end]
                held += piece[end:]
                if mentions_cached(self._api, lines):
                    async for part in self._lines(lines):
                        yield part
                else:
                    yield lines
        except Exception:
            if held:
                yield bytes(held)  # what the engine said before it broke off
            raise
        if held:
            yield await self._line(bytes(held))

    async def _lines(self, lines: bytes) -> AsyncIterator[bytes]:
        """What stands before a line that has to be looked at does not wait for it."""
        start = 0
        for found in _LINE.finditer(lines):
            if not mentions_cached(self._api, found.group()):
                continue
            if start < found.start():
                yield lines[start : found.start()]
            yield await self._line(found.group())
            start = found.end()
        if start < len(lines):
            yield lines[start:]

    async def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            return line
        text = line.rstrip(b"\r\n")
        return b"".join((_DATA, await self.document(text[len(_DATA) :]), line[len(text) :]))

    async def _usage(self) -> Usage | None:
        if not self._known:
            self._known, self._prefill = True, await self._prefill_usage()
        return self._prefill


class UsageWatch:
    """Reads an answer's usage while every piece goes on first, untouched."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._mark = cached_mark(api)
        self._in_lines = True
        self._held = bytearray()
        self._overlong = False
        self.usage: Usage | None = None

    def reads(self, status: int, headers: MultiMapping[str]) -> bool:
        """Whether an answer with this head says anything."""
        kind = edit_kind(status, headers)
        self._in_lines = kind is Edit.EVENTS
        return kind is not None

    def saw(self, piece: bytes) -> None:
        """A piece that has gone on."""
        if self._in_lines and not self._held and piece.endswith(b"\n") and self._mark not in piece:
            self._overlong = False  # whole lines without a figure: nearly all of a stream
            return
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1 if self._in_lines else 0
        if end:
            if not self._overlong:
                self._look(bytes(self._held) + piece[:end])
            self._overlong = False
            self._held.clear()
        if self._overlong:
            return
        self._held += piece[end:]
        if len(self._held) > MAX_WATCHED_BYTES:
            self._overlong = True
            self._held.clear()

    def ended(self) -> None:
        """The answer is complete."""
        if not self._overlong:
            self._look(bytes(self._held))

    def _look(self, text: bytes) -> None:
        if not mentions_cached(self._api, text):
            return
        for document in _data_lines(text) if self._in_lines else (text,):
            self.usage = read_usage(self._api, document) or self.usage


def _data_lines(text: bytes) -> Iterator[bytes]:
    """What stands behind `data:` in complete lines."""
    return (line[5:] for line in text.splitlines() if line.startswith(b"data:"))


def _take(held: bytearray) -> bytes:
    taken = bytes(held)
    held.clear()
    return taken
