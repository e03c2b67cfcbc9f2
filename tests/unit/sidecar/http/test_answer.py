"""What an answer writes: its framing, its end, and its break, against a transport that keeps the bytes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from multidict import CIMultiDict

from sidecar.http.answer import Answer
from sidecar.http.body import Body
from sidecar.http.message import Framing, PeerGone, RequestHead


class Wire:
    """A transport, and the channel around it."""

    def __init__(self) -> None:
        self.sends: list[bytes] = []
        self.how_ended = ""
        self.congested = False
        self.writes_from: Body | None = None
        self.may_be_kept = True

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self)

    def write(self, data: bytes) -> None:
        assert not self.how_ended
        self.sends.append(data)

    def is_closing(self) -> bool:
        return bool(self.how_ended)

    def close(self) -> None:
        self.how_ended = "closed"

    def abort(self) -> None:
        self.how_ended = "reset"

    def get_extra_info(self, _: str) -> None:
        return None

    async def drained(self) -> None:
        raise NotImplementedError


def _answer(wire: Wire, method: str = "POST", *, is_1_1: bool = True, keep_alive: bool = True) -> Answer:
    headers = CIMultiDict({"Host": "t"})
    return Answer(RequestHead(method, "/", is_1_1, headers, Framing.NONE, None, keep_alive, False), wire)


def _sent(wire: Wire) -> tuple[bytes, bytes]:
    head, _, body = b"".join(wire.sends).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("headers", "is_1_1", "line", "body"),
    [
        ({"Content-Length": "5"}, True, b"Content-Length: 5", b"abcde"),
        ({}, True, b"Transfer-Encoding: chunked", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
        ({}, False, b"Connection: close", b"abcde"),
    ],
)
def test_framings(headers: dict[str, str], is_1_1: bool, line: bytes, body: bytes) -> None:
    wire = Wire()
    answer = _answer(wire, is_1_1=is_1_1, keep_alive=is_1_1)
    answer.begin(200, "OK", CIMultiDict(headers))
    for piece in (b"abc", b"", b"de"):
        answer.write(piece)
    answer.end()
    head, sent = _sent(wire)
    assert (line in head, sent, answer.ended, answer.keep_alive) == (True, body, True, is_1_1)
    assert len(wire.sends) == 1, "what is there at once leaves in one send"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_answers_without_a_body(method: str, status: int) -> None:
    wire = Wire()
    answer = _answer(wire, method)
    answer.begin(status, "", CIMultiDict({"Content-Length": "5"}))
    answer.write(b"abcde")
    answer.end()
    head, body = _sent(wire)
    assert (body, answer.ended) == (b"", True)
    assert (b"Content-Length" in head) == (status != 204)


@pytest.mark.parametrize("body", [b"abcd", b"abcdef"])
def test_another_length_than_was_said_is_a_break(body: bytes) -> None:
    wire = Wire()
    answer = _answer(wire)
    answer.begin(200, "OK", CIMultiDict({"Content-Length": "5"}))
    answer.write(body)
    answer.end()
    assert (answer.ended, wire.how_ended) == (False, "closed")


@pytest.mark.parametrize(("is_1_1", "how"), [(True, "closed"), (False, "reset")])
def test_a_break_is_seen_by_every_client(is_1_1: bool, how: str) -> None:
    """HTTP/1.0 without a length: the end of the connection in order would be the end of the body."""
    wire = Wire()
    answer = _answer(wire, is_1_1=is_1_1)
    answer.begin(200, "OK", CIMultiDict())
    answer.write(b"abc")
    answer.break_off()
    assert wire.how_ended == how
    assert b"0\r\n\r\n" not in wire.sends[-1]


def test_it_is_begun_once() -> None:
    answer = _answer(Wire())
    answer.whole(200, "OK", CIMultiDict(), b"a")
    with pytest.raises(AssertionError, match="twice"):
        answer.begin(200, "OK", CIMultiDict())


def test_a_client_that_has_gone_gets_nothing() -> None:
    wire = Wire()
    answer = _answer(wire)
    answer.begin(200, "OK", CIMultiDict())
    wire.abort()
    answer.write(b"a")
    answer.end()
    assert wire.sends == []


@pytest.mark.parametrize("kept", [True, False])
def test_whether_the_connection_goes_on(kept: bool) -> None:
    wire = Wire()
    wire.may_be_kept = kept
    answer = _answer(wire)
    answer.whole(200, "OK", CIMultiDict(), b"a")
    assert (answer.keep_alive, b"Connection: close" in wire.sends[0]) == (kept, not kept)


class _Flow:
    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def test_pouring_sends_what_arrives_together_at_once() -> None:
    wire, body, seen = Wire(), Body(_Flow()), list[bytes]()
    answer = _answer(wire)
    body.feed(b"a")
    answer.begin(200, "OK", CIMultiDict())
    pouring = asyncio.create_task(answer.pour(body, seen.append))
    await asyncio.sleep(0)
    assert wire.sends[0].endswith(b"\r\n\r\n1\r\na\r\n"), "the head does not wait"
    body.feed(b"b")
    body.feed(b"c")
    body.flush()
    body.feed(b"d")
    body.end()
    await pouring
    assert wire.sends[1:] == [b"1\r\nb\r\n1\r\nc\r\n", b"1\r\nd\r\n0\r\n\r\n"]
    assert seen == [b"a", b"b", b"c", b"d"]


async def test_a_body_that_breaks_while_it_is_poured() -> None:
    wire, body = Wire(), Body(_Flow())
    answer = _answer(wire)
    answer.begin(200, "OK", CIMultiDict())
    pouring: asyncio.Task[Any] = asyncio.create_task(answer.pour(body))
    await asyncio.sleep(0)
    body.fail(PeerGone())
    with pytest.raises(PeerGone):
        await pouring
    assert not answer.ended
