"""A short document goes back in one message; nothing else is held, and a whole answer ends the stream."""

from __future__ import annotations

import pytest

from epp.extproc import events as ev
from tests.unit.extproc.test_session import OK, SSE, finish_of, forwarded, only

RESPONSE = ev.Direction.RESPONSE


def document(length: str, kind: str = "application/json", *more: tuple[str, str]) -> ev.ResponseHeaders:
    fields = ((":status", "200"), ("content-type", kind), ("content-length", length), *more)
    return ev.ResponseHeaders(ev.Headers.of(*fields))


def pieces(actions: list[ev.Action]) -> list[ev.SendBodyPiece]:
    return [action for action in actions if isinstance(action, ev.SendBodyPiece)]


def test_a_short_document_and_its_empty_end_are_one_message() -> None:
    it = forwarded()
    it.receive(document("10"))
    held = it.receive(ev.ResponseBody(b'{"a":', False)) + it.receive(ev.ResponseBody(b'"b"} ', False))
    assert pieces(held) == []
    assert only(held, ev.FirstToken) == [ev.FirstToken()]  # the moment is when it came
    assert pieces(it.receive(ev.ResponseBody(b"", True))) == [ev.SendBodyPiece(RESPONSE, b'{"a":"b"} ', True)]


@pytest.mark.parametrize(
    "headers",
    [OK, SSE, document("62001"), document("10", "text/plain"), document("x"), document("9" * 30)],
)
def test_whatever_may_go_on_for_long_passes_at_once(headers: ev.ResponseHeaders) -> None:
    it = forwarded()
    it.receive(headers)
    assert pieces(it.receive(ev.ResponseBody(b"data: 1\n\n", False)))


def test_more_than_was_announced_passes_at_once() -> None:
    it = forwarded()
    it.receive(document("3"))
    assert pieces(it.receive(ev.ResponseBody(b"1234", False))) == [ev.SendBodyPiece(RESPONSE, b"1234", False)]


def test_trailers_bring_what_was_held() -> None:
    it = forwarded()
    it.receive(document("10"))
    it.receive(ev.ResponseBody(b"12345", False))
    assert it.receive(ev.ResponseTrailers())[:2] == [
        ev.SendBodyPiece(RESPONSE, b"12345", False),
        ev.SendTrailers(RESPONSE),
    ]


def test_a_whole_answer_ends_the_conversation_and_an_open_one_does_not() -> None:
    it = forwarded()
    assert not it.over
    it.receive(OK)
    it.receive(ev.ResponseBody(b"{}", False))
    assert not it.over
    assert finish_of(it.receive(ev.ResponseBody(b"", True))).outcome.completed
    assert it.over
    assert it.receive(ev.StreamEnded()) == []
