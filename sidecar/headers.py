"""Which headers pass, in both directions. Pure.

Hop-by-hop headers (RFC 9110 section 7.6.1, and whatever `Connection` names) and framing headers
belong to one connection and are never copied; `sidecar.http` frames each side itself. Routing
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
# the server side answers 100-continue itself
_REQUEST_DROPPED = _HOP_BY_HOP.union({"expect"}, wire.ROUTING_HEADERS)
_ANSWER_DROPPED_IF_CHUNKED = _HOP_BY_HOP.union({"content-length"})


def request_headers(incoming: MultiMapping[str], *, without: Iterable[str] = ()) -> CIMultiDict[str]:
    """Headers for an engine; `without` names more to leave out (lower case)."""
    return _copy(incoming, _REQUEST_DROPPED.union(without))


def response_headers(incoming: MultiMapping[str]) -> CIMultiDict[str]:
    """Headers for the client. A content-length beside transfer-encoding is void and left out."""
    chunked = "transfer-encoding" in incoming
    return _copy(incoming, _ANSWER_DROPPED_IF_CHUNKED if chunked else _HOP_BY_HOP)


def values_of(headers: MultiMapping[str], name: str) -> tuple[str, ...]:
    """All values of a list header: repeated lines and comma lists alike, without empty ones."""
    lines = headers.getall(name, ())
    if not lines:
        return ()
    parts = (part.strip() for line in lines for part in line.split(","))
    return tuple(part for part in parts if part)


def joined(headers: MultiMapping[str], name: str) -> str:
    """A header as one text, repeated lines joined by commas; absent is empty."""
    return ",".join(headers.getall(name, ())).strip()


def _copy(incoming: MultiMapping[str], without: frozenset[str]) -> CIMultiDict[str]:
    dropped = without
    if "connection" in incoming:
        dropped = dropped.union(name.lower() for name in values_of(incoming, "connection"))
    return CIMultiDict([item for item in incoming.items() if item[0].lower() not in dropped])
