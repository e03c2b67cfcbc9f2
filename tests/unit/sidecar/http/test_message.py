"""Heads as bytes: nothing that a value says can begin another line."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from sidecar.http.message import answer_bytes, request_bytes


def test_heads() -> None:
    headers = CIMultiDict([("Host", "t"), ("X", "1"), ("x", "caf\udce9")])
    assert request_bytes("GET", "/a", headers) == b"GET /a HTTP/1.1\r\nHost: t\r\nX: 1\r\nx: caf\xe9\r\n\r\n"
    assert answer_bytes(200, "", CIMultiDict()) == b"HTTP/1.1 200 \r\n\r\n"


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_a_line_break_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_bytes("GET", "/", CIMultiDict({"X": f"a{end}Y: b"}))
    with pytest.raises(ValueError, match="line break"):
        request_bytes("GET", f"/ HTTP/1.1{end}X: y", CIMultiDict())
    with pytest.raises(ValueError, match="line break"):
        answer_bytes(200, f"OK{end}", CIMultiDict())
