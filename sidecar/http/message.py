"""Heads of HTTP/1.1 messages as values and as bytes, and what a peer can do wrong. Pure.

Header bytes that are not UTF-8 are surrogates in the text and the same bytes again when it is written.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from multidict import CIMultiDict, MultiMapping

ENCODING: Final = "utf-8"
ERRORS: Final = "surrogateescape"
LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpFault(Exception):
    """Root of what the other end of a connection can do wrong."""


class BadMessage(HttpFault):
    """Not HTTP as we take it. The text is a fixed one, never what the peer sent; `status` for a client."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class PeerGone(HttpFault):
    """The connection ended in the middle of a message."""


class PeerIdle(HttpFault):
    """No byte moved for the idle time."""


class BodyOverLimit(HttpFault):
    """More bytes than the reader of the body wants to hold."""


class UploadBroken(HttpFault):
    """The body that was being passed on broke; the engine is not at fault."""


class Framing(enum.Enum):
    """How the end of a body is known."""

    NONE = "none"  # there is no body
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"  # by the end of the connection: answers only


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a client asks."""

    method: str
    target: str  # as it was written
    is_1_1: bool
    headers: CIMultiDict[str]
    framing: Framing
    content_length: int | None
    keep_alive: bool
    expects_continue: bool

    @property
    def path(self) -> str:
        """Decoded, without the query."""
        target = self.target if self.target.startswith("/") else self.path_and_query
        path = target.partition("?")[0].partition("#")[0]
        return unquote(path) if "%" in path else path

    @property
    def path_and_query(self) -> str:
        """The target as an engine gets it; of an absolute-form target what follows the authority."""
        if self.target.startswith("/") or "://" not in self.target:
            return self.target
        try:
            parts = urlsplit(self.target)
        except ValueError:
            return self.target
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an engine answers."""

    status: int
    reason: str
    headers: CIMultiDict[str]
    framing: Framing


def request_bytes(method: str, target: str, headers: MultiMapping[str]) -> bytes:
    """A request's head. Raises ValueError: a line break in one of the texts."""
    return _head(f"{method} {target} HTTP/1.1", headers.items())


def answer_bytes(status: int, reason: str, headers: MultiMapping[str]) -> bytes:
    """An answer's head. Raises ValueError: a line break in one of the texts."""
    return _head(f"HTTP/1.1 {status} {reason}", headers.items())


def chunk(piece: bytes) -> bytes:
    """`piece` (not empty: that would be the last one) in chunked framing."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _head(first: str, fields: Iterable[tuple[str, str]]) -> bytes:
    lines = [first, *[f"{name}: {value}" for name, value in fields], "\r\n"]
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError("a line break in a head")
    return text.encode(ENCODING, ERRORS)
