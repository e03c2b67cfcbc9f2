"""What is HTTP for us and what is not: smuggling is refused, limits hold, and cuts change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.http.message import AnswerHead, BadMessage, Framing, RequestHead
from sidecar.http.reader import MAX_FIELDS, MAX_HEAD_BYTES, AnswerReader, RequestReader

_POST = b"POST /p HTTP/1.1\r\nHost: t\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Seen:
    """Takes events; pieces are joined, so that cuts cannot be seen."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, bytes]] = []
        self.ended = 0

    def begin(self, head: Any) -> None:
        self.messages.append((head, b""))

    def piece(self, data: bytes) -> None:
        head, body = self.messages[-1]
        self.messages[-1] = (head, body + data)

    def end(self) -> None:
        self.ended += 1


def _requests(*pieces: bytes) -> Seen:
    seen = Seen()
    reader = RequestReader(seen)
    for piece in pieces:
        reader.feed(piece)
    return seen


def _answers(*pieces: bytes, head_only: bool = False) -> Seen:
    seen = Seen()
    reader = AnswerReader(seen)
    reader.head_only = head_only
    for piece in pieces:
        reader.feed(piece)
    return seen


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (_POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
        (_POST + b"Content-Length: 1, 1\r\n\r\nx", 400),
        (_POST + b"Content-Length: +1\r\n\r\nx", 400),
        (_POST + b"Content-Length: \r\n\r\nx", 400),
        (_POST + b"Content-Length: 99999999999999999999\r\n\r\nx", 400),
        (_POST + b"Content-Length : 1\r\n\r\nx", 400),
        (_POST + b"Transfer-Encoding: gzip\r\n\r\nx", 501),
        (_POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST /p HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"X: a\r\n folded\r\n\r\n", 400),
        (_POST + b" X: folded\r\n\r\n", 400),
        (_POST + b"X: a\nY: b\r\n\r\n", 400),
        (_POST + b"X: a\rY: b\r\n\r\n", 400),
        (_POST + b"X: a\0b\r\n\r\n", 400),
        (_POST + b": b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: t\n\n", 400),
        (_CHUNKED + b"1\nx\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"1 \r\nx\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"fffffffffffffffff\r\nx", 400),
        (_CHUNKED + b"1\r\nxy0\r\n\r\n", 400),
        (_CHUNKED + b"-1\r\nx\r\n0\r\n\r\n", 400),
        (_CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.2\r\nHost: t\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\nHost: t\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        (b"FOO / HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        (_POST + b"Expect: tea\r\nContent-Length: 1\r\n\r\nx", 417),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    ],
)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_refused(request_bytes: bytes, status: int, cut: bool) -> None:
    pieces = [request_bytes[n : n + 1] for n in range(len(request_bytes))] if cut else [request_bytes]
    with pytest.raises(BadMessage) as caught:
        _requests(*pieces)
    assert caught.value.status == status


def test_the_text_of_a_refusal_is_never_what_was_sent() -> None:
    with pytest.raises(BadMessage) as caught:
        _requests(_CHUNKED + b"secret\r\n")
    assert "secret" not in str(caught.value)


_ANSWER_HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        _ANSWER_HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        _ANSWER_HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        _ANSWER_HEAD + b"Transfer-Encoding: gzip\r\n\r\nx",
        _ANSWER_HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        _ANSWER_HEAD + b"X: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nzz",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
    ],
)
def test_an_answer_that_is_not_http(answer: bytes) -> None:
    with pytest.raises(BadMessage):
        _answers(answer)


@pytest.mark.parametrize(
    "filler",
    [
        b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n",
        b"".join(b"X%d: v\r\n" % n for n in range(MAX_FIELDS + 2)),
        b"X" * MAX_HEAD_BYTES + b": 1\r\n",
    ],
    ids=["value", "count", "name"],
)
@pytest.mark.parametrize("kind", ["head", "trailer", "answer"])
@pytest.mark.parametrize("ended", [True, False])
def test_heads_and_trailers_are_bounded(filler: bytes, kind: str, ended: bool) -> None:
    begin = {"head": _POST, "trailer": _CHUNKED + b"1\r\nx\r\n0\r\n", "answer": _ANSWER_HEAD}[kind]
    read = _answers if kind == "answer" else _requests
    last = b"Y: 1\r\n\r\n" if ended else b""
    with pytest.raises(BadMessage, match="too large"):
        read(begin, filler + last)
    with pytest.raises(BadMessage, match="too large"):  # in pieces, none of which is large
        read(begin, *[filler[n : n + 4096] for n in range(0, len(filler), 4096)], last)
    assert read(begin, filler[: 1 << 10] if kind != "count" else b"") is not None


def test_chunk_extensions_and_targets_are_bounded() -> None:
    with pytest.raises(BadMessage, match="too large"):
        _requests(_CHUNKED, b"1;", *[b"x" * 4096] * (MAX_HEAD_BYTES // 4096 + 1))
    with pytest.raises(BadMessage, match="too large"):
        _requests(b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: t\r\n\r\n")


def test_a_long_body_in_small_chunks_is_not_a_large_head() -> None:
    seen = _requests(_CHUNKED, *[b"1\r\nx\r\n" * 1000] * 100, b"0\r\n\r\n")
    assert (seen.ended, seen.messages[0][1]) == (1, b"x" * 100_000)


_STREAM = (
    b"\r\nPOST /a?b=%20 HTTP/1.1\r\nHost: t\r\nX: \xe9\r\nContent-Length: 3\r\n\r\nabc"
    b"GET / HTTP/1.1\r\nHost: t\r\nUpgrade: h2c\r\n\r\n"
    b"PUT /c HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: Chunked\r\nExpect: 100-continue\r\n\r\n"
    b"2;x=y\r\nde\r\n1\r\nf\r\n0\r\nTrailer: dropped\r\n\r\n"
    b"GET /d HTTP/1.0\r\nExpect: 100-continue\r\n\r\n"
)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_cut_gives_the_same_requests(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(_STREAM)), max_size=20)))
    pieces = [_STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(_STREAM)], strict=True)]
    seen = _requests(*pieces)
    assert seen.ended == 4
    heads: list[RequestHead] = [head for head, _ in seen.messages]
    assert [body for _, body in seen.messages] == [b"abc", b"", b"def", b""]
    assert [(head.method, head.target, head.is_1_1) for head in heads] == [
        ("POST", "/a?b=%20", True),
        ("GET", "/", True),
        ("PUT", "/c", True),
        ("GET", "/d", False),
    ]
    assert [head.framing for head in heads] == [Framing.LENGTH, Framing.NONE, Framing.CHUNKED, Framing.NONE]
    assert [head.keep_alive for head in heads] == [True, True, True, False]
    assert [head.expects_continue for head in heads] == [False, False, True, False]
    assert heads[0].content_length == 3
    assert heads[0].headers["x"].encode("utf-8", "surrogateescape") == b"\xe9"
    assert "Trailer" not in heads[2].headers


_ANSWERS = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 Fine\r\nX: 1\r\nContent-Length: 3\r\n\r\nabc"
    b"HTTP/1.1 304 Same\r\nContent-Length: 9\r\n\r\n"
    b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\nT: 1\r\n\r\n"
    b"HTTP/1.0 200 OK\r\n\r\nup to the end"
)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_cut_gives_the_same_answers(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(_ANSWERS)), max_size=20)))
    pieces = [_ANSWERS[a:b] for a, b in zip([0, *cuts], [*cuts, len(_ANSWERS)], strict=True)]
    seen = _answers(*pieces)
    heads: list[AnswerHead] = [head for head, _ in seen.messages]
    assert [body for _, body in seen.messages] == [b"abc", b"", b"de", b"up to the end"]
    assert seen.ended == 3, "the last one ends with its connection"
    assert [(head.status, head.reason) for head in heads] == [
        (200, "Fine"),
        (304, "Same"),
        (200, ""),
        (200, "OK"),
    ]
    assert [head.framing for head in heads] == [
        Framing.LENGTH,
        Framing.NONE,
        Framing.CHUNKED,
        Framing.CLOSE,
    ]


def test_an_answer_to_head_has_no_body_and_ends_the_connection() -> None:
    seen = Seen()
    reader = AnswerReader(seen)
    reader.head_only = True
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert (seen.ended, seen.messages[0][0].framing, reader.keep_alive) == (1, Framing.NONE, False)


@pytest.mark.parametrize(
    ("target", "path", "sent"),
    [
        ("/v1/%63ompletions?x=1", "/v1/completions", "/v1/%63ompletions?x=1"),
        ("http://host:1/a/b?c=d", "/a/b", "/a/b?c=d"),
        ("http://host", "/", "/"),
        ("/a%2Fb//c/../d?e=%zz", "/a/b//c/../d", "/a%2Fb//c/../d?e=%zz"),
        ("*", "*", "*"),
    ],
)
def test_the_path_of_a_target(target: str, path: str, sent: str) -> None:
    head = _requests(f"OPTIONS {target} HTTP/1.1\r\nHost: t\r\n\r\n".encode()).messages[0][0]
    assert (head.path, head.path_and_query) == (path, sent)


def test_what_follows_an_upgrade_is_not_read() -> None:
    seen = Seen()
    reader = RequestReader(seen)
    reader.feed(
        b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nGET /2 HTTP/1.1\r\n\r\n"
    )
    assert (reader.upgraded, seen.ended, seen.messages[0][0].keep_alive) == (True, 1, False)
