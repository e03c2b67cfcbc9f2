"""Which headers pass: all end-to-end ones with all values, no hop-by-hop, framing or routing ones."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from sidecar import wire
from sidecar.headers import joined, request_headers, response_headers, values_of

_HOP = (
    "Connection",
    "Keep-Alive",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)


def test_end_to_end_headers_keep_all_values_in_order() -> None:
    pairs = [("X-A", "1"), ("Authorization", "Bearer t"), ("x-a", "2"), ("X-Request-Id", "r"), ("X-A", "")]
    assert list(request_headers(CIMultiDict(pairs)).items()) == pairs
    assert list(response_headers(CIMultiDict(pairs)).items()) == pairs


@pytest.mark.parametrize("name", [*_HOP, "Expect", *(name.upper() for name in wire.ROUTING_HEADERS)])
def test_never_sent_to_an_engine(name: str) -> None:
    assert "X-Kept" in (sent := request_headers(CIMultiDict([(name, "v"), ("X-Kept", "1"), (name, "w")])))
    assert name not in sent


@pytest.mark.parametrize("name", _HOP)
def test_never_sent_to_a_client(name: str) -> None:
    assert list(response_headers(CIMultiDict([(name, "v"), ("X-Kept", "1")]))) == ["X-Kept"]


def test_what_connection_names_is_hop_by_hop_too() -> None:
    sent = request_headers(CIMultiDict([("Connection", "close, X-Once"), ("x-once", "1"), ("X-Kept", "1")]))
    assert list(sent) == ["X-Kept"]


def test_a_length_beside_transfer_encoding_is_void() -> None:
    both = CIMultiDict([("Transfer-Encoding", "chunked"), ("Content-Length", "5")])
    assert not response_headers(both)
    assert response_headers(CIMultiDict({"Content-Length": "5"}))["content-length"] == "5"


def test_lists_and_repeated_lines_are_one_list() -> None:
    headers = CIMultiDict([("A", "1, 2"), ("A", ",3 ,")])
    assert values_of(headers, "a") == ("1", "2", "3")
    assert joined(headers, "a") == "1, 2,,3 ,"
    assert joined(headers, "b") == ""
