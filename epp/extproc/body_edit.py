"""How an answer's text is edited in every body mode, compressed or not.

gzip is taken apart, edited and put together again, piece by piece: for engines that compress although the
request did not allow it. What is no gzip passes as it came, from there on. Must not hold back more than the
edit does.
"""

from __future__ import annotations

import zlib
from typing import Final, Protocol

from epp.extproc import events as ev

_GZIP_WBITS: Final = 16 + zlib.MAX_WBITS
_LEVEL: Final = 1  # on the loop: speed counts


class BodyEdit(Protocol):
    """Changes a body as it passes, whatever its cuts."""

    def feed(self, chunk: bytes, *, end: bool) -> bytes:
        """What may go on now; all of it at the `end`."""
        ...


def edit_of(edit: BodyEdit, encodings: tuple[str, ...], mode: ev.BodyMode) -> BodyEdit | None:
    """What edits an answer with these encodings; None: nothing can. In STREAMED mode every message has to be
    answered with its own bytes, and a compressed one means nothing alone."""
    if not encodings:
        return edit
    can = encodings in (("gzip",), ("x-gzip",)) and mode is not ev.BodyMode.STREAMED
    return GzipEdit(edit) if can else None


def kept_or_replaced(edit: BodyEdit | None, body: bytes, mode: ev.BodyMode) -> ev.Action:
    """The answer to a body message of the modes other than FULL_DUPLEX_STREAMED. Nothing is held, since it
    could not be sent later: what a cut divides in STREAMED mode stays as it was."""
    changed = body if edit is None or not body else edit.feed(body, end=True)
    if changed == body:
        return ev.KeepBody(ev.Direction.RESPONSE)
    return ev.ReplaceBody(changed, whole=mode is ev.BodyMode.BUFFERED)


class GzipEdit:
    """`inner` on the text of a gzip body."""

    def __init__(self, inner: BodyEdit) -> None:
        self._inner = inner
        self._unpack = zlib.decompressobj(_GZIP_WBITS)
        self._pack = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WBITS)
        self._raw = False

    def feed(self, chunk: bytes, *, end: bool) -> bytes:
        if self._raw or (not chunk and not end):
            return chunk
        try:
            text = self._text(chunk)
        except zlib.error:
            self._raw = True
            return chunk
        text = self._inner.feed(text, end=end)
        return self._pack.compress(text) + self._pack.flush(zlib.Z_FINISH if end else zlib.Z_SYNC_FLUSH)

    def _text(self, chunk: bytes) -> bytes:
        text = self._unpack.decompress(chunk)
        while self._unpack.eof and self._unpack.unused_data:  # one member after another
            rest = self._unpack.unused_data
            self._unpack = zlib.decompressobj(_GZIP_WBITS)
            text += self._unpack.decompress(rest)
        return text
