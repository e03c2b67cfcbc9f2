"""Which headers pass, in both directions. Pure.

Hop-by-hop headers (RFC 9110 section 7.6.1, and whatever `Connection` names) and framing headers
belong to one connection and are never copied; the HTTP library frames each side itself. Routing
headers are consumed here. Everything else passes with all its values, in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict, MultiMapping

from sidecar import wire

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# the server side has answered 100-continue already
_REQUEST_ONLY = frozenset({"expect", *wire.ROUTING_HEADERS})


def request_headers(incoming: MultiMapping[str], *, without: Iterable[str] = ()) -> CIMultiDict[str]:
    """Headers for an engine; `without` names more to leave out (lower case)."""
    return _copy(incoming, _REQUEST_ONLY.union(without))


def response_headers(incoming: MultiMapping[str]) -> CIMultiDict[str]:
    """Headers for the client. A content-length beside transfer-encoding is void and left out."""
    return _copy(incoming, {"content-length"} if "transfer-encoding" in incoming else frozenset())


def values_of(headers: MultiMapping[str], name: str) -> tuple[str, ...]:
    """All values of a list header: repeated lines and comma lists alike, without empty ones."""
    parts = (part.strip() for line in headers.getall(name, ()) for part in line.split(","))
    return tuple(part for part in parts if part)


def joined(headers: MultiMapping[str], name: str) -> str:
    """A header as one text, repeated lines joined by commas; absent is empty."""
    return ",".join(headers.getall(name, ())).strip()


def _copy(incoming: MultiMapping[str], without: Iterable[str]) -> CIMultiDict[str]:
    dropped = _HOP_BY_HOP.union(without)
    if "connection" in incoming:
        dropped = dropped.union(name.lower() for name in values_of(incoming, "connection"))
    return CIMultiDict(
        (name, _sendable(value)) for name, value in incoming.items() if name.lower() not in dropped
    )


def _sendable(value: str) -> str:
    """Header bytes that are not UTF-8 arrive as surrogates, which cannot be sent: read as Latin-1."""
    if value.isascii():
        return value
    return value.encode("utf-8", "surrogateescape").decode("latin-1") if _has_surrogates(value) else value


def _has_surrogates(value: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in value)
