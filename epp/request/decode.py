"""Compressed bodies, decoded for the decision only: the engine gets the client's bytes.

Why bounded: 10 KB can expand to 1 GB. Output is produced piece by piece and given up as soon as it
passes a size, or a ratio that no prompt text has. Input is handed over piece by piece, too: what a
decoder leaves of it is copied, and a body may consist of a million members that hold nothing. gzip
needs nothing but the standard library; zstd needs the `zstandard` package and is routed by load
without it, as every other encoding is.
"""

from __future__ import annotations

import importlib
import io
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from epp.request.prompts import NoPrompt, Reason

MAX_DECODED_BYTES: Final = 8 << 20
MAX_RATIO: Final = 100  # prompts reach 3 to 20
FREE_RATIO_BYTES: Final = 1 << 20  # up to here any ratio will do
MAX_STACKED: Final = 2
MAX_GZIP_MEMBERS: Final = 10_000  # compressors that work in parallel make one of 64 KiB or more
_PIECE_BYTES: Final = 1 << 16
_INPUT_BYTES: Final = 1 << 12
_GZIP_WBITS: Final = 16 + zlib.MAX_WBITS


def content_encodings(header: str) -> tuple[str, ...]:
    """Encodings of a content-encoding header in the order they were applied, without `identity`."""
    names = (name.strip().lower() for name in header.split(","))
    return tuple(name for name in names if name not in ("", "identity"))


def decode_body(body: bytes, encodings: tuple[str, ...]) -> bytes:
    """`body` without its encodings. Blocks: a few milliseconds a megabyte, GIL released.

    Raises:
        NoPrompt: an encoding that is not read here, a broken stream, or one that expands too far.
    """
    if len(encodings) > MAX_STACKED or not all(name in _DECODERS for name in encodings):
        raise NoPrompt(Reason.UNKNOWN_ENCODING)
    if len(body) > MAX_DECODED_BYTES:
        raise NoPrompt(Reason.DECODED_SIZE)
    limit_bytes = min(MAX_DECODED_BYTES, max(FREE_RATIO_BYTES, MAX_RATIO * len(body)))
    for name in reversed(encodings):
        body = _bounded(_DECODERS[name](body), limit_bytes)
    return body


def _bounded(pieces: Iterator[bytes], limit_bytes: int) -> bytes:
    decoded = bytearray()
    for piece in pieces:
        decoded += piece
        if len(decoded) > limit_bytes:
            raise NoPrompt(Reason.DECODED_SIZE)
    return bytes(decoded)


def _gunzip(body: bytes) -> Iterator[bytes]:
    """Any number of members up to a bound, the last one whole."""
    at = 0
    for _ in range(MAX_GZIP_MEMBERS):
        if at == len(body):
            return
        at = yield from _gunzip_member(body, at)
    if at < len(body):
        raise NoPrompt(Reason.UNKNOWN_ENCODING)


def _gunzip_member(body: bytes, at: int) -> Generator[bytes, None, int]:
    """The member that begins at `at`; returns where it ends."""
    member = zlib.decompressobj(_GZIP_WBITS)
    try:
        while not member.eof:
            given = member.unconsumed_tail
            if not given:
                given = body[at : at + _INPUT_BYTES]
                at += len(given)
            piece = member.decompress(given, _PIECE_BYTES)
            if not piece and at == len(body) and not member.unconsumed_tail and not member.eof:
                raise NoPrompt(Reason.BROKEN_ENCODING)  # cut short
            yield piece
    except zlib.error:
        raise NoPrompt(Reason.BROKEN_ENCODING) from None
    return at - len(member.unused_data)


def _unzstd(body: bytes) -> Iterator[bytes]:
    """Any number of frames. The window is bounded, too: a frame may ask for gigabytes."""
    decompressor = _zstandard.ZstdDecompressor(max_window_size=MAX_DECODED_BYTES)
    try:
        with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            while piece := reader.read(_PIECE_BYTES):
                yield piece
    except _zstandard.ZstdError:
        raise NoPrompt(Reason.BROKEN_ENCODING) from None


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gunzip, "x-gzip": _gunzip}
try:
    _zstandard: Any = importlib.import_module("zstandard")
except ImportError:
    _zstandard = None
else:
    _DECODERS["zstd"] = _unzstd
