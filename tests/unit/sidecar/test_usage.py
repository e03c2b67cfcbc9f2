"""Cached tokens: what neither leg computed, in the digits and nowhere else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from sidecar.answer_edit import MAX_LINE_BYTES, Edit, UsageEdit, edit_kind
from sidecar.kv_params import Api
from sidecar.usage import Usage, corrected, read_usage


def usage_of(api: Api, cached: Any, total: int = 100) -> dict[str, Any]:
    """The usage object of one API."""
    if api is Api.MESSAGES:
        return {"input_tokens": total, "cache_read_input_tokens": cached, "output_tokens": 2}
    details = "input_tokens_details" if api is Api.RESPONSES else "prompt_tokens_details"
    return {"prompt_tokens": total, details: {"cached_tokens": cached}}


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(("own", "prefill", "right"), [(96, 32, 32), (96, 0, 0), (16, 32, 16), (96, None, 0)])
def test_the_smaller_figure_is_right(api: Api, own: int, prefill: int | None, right: int) -> None:
    document = json.dumps({"id": "x", "usage": usage_of(api, own)}, indent=1).encode()
    told = None if prefill is None else Usage(prefill, 100)
    expected = json.dumps({"id": "x", "usage": usage_of(api, right)}, indent=1).encode()
    assert corrected(api, document, told) == expected


@pytest.mark.parametrize("api", Api)
def test_a_right_figure_is_the_same_object(api: Api) -> None:
    document = json.dumps({"usage": usage_of(api, 32)}).encode()
    assert corrected(api, document, Usage(32, 100)) is document
    assert read_usage(api, document) == Usage(32, 100 if api is Api.MESSAGES else None)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("value", [None, "96", -1, 96.0, True, [96], 10**30, {}])
def test_odd_figures_pass_and_are_not_believed(api: Api, value: Any) -> None:
    document = json.dumps({"usage": usage_of(api, value)}).encode()
    assert corrected(api, document, Usage(0)) is document
    assert read_usage(api, document) is None


@pytest.mark.parametrize("usage", ["text", [1], None, {"prompt_tokens_details": None}, {}])
def test_an_answer_without_a_figure_gets_none(usage: Any) -> None:
    document = json.dumps({"usage": usage, "text": '"usage":{"cached_tokens":5}'}).encode()
    assert corrected(Api.CHAT, document, None) is document
    assert read_usage(Api.CHAT, document) is None


@pytest.mark.parametrize(
    "document", [b"", b"{", b"[DONE]", b'{"usage":{"prompt_tokens_details":{"cached_tokens":5}']
)
def test_what_is_not_json_passes(document: bytes) -> None:
    assert corrected(Api.CHAT, document, None) is document


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (Usage(90, 10), Usage(40, 60), Usage(40, 60)),  # cached tokens are not part of input_tokens
        (Usage(90, 100), Usage(40, 100), Usage(40, 100)),  # they are
        (Usage(90, 10), Usage(40, 7), Usage(40, 10)),  # neither sum agrees: nothing is known
    ],
)
def test_messages_keep_the_sum_of_their_own_convention(
    decode: Usage, prefill: Usage, expected: Usage
) -> None:
    def document(usage: Usage) -> bytes:
        assert usage.input_tokens is not None
        body = {
            "type": "message_start",
            "message": {"usage": usage_of(Api.MESSAGES, usage.cached_tokens, usage.input_tokens)},
        }
        return json.dumps(body).encode()

    assert corrected(Api.MESSAGES, document(decode), prefill) == document(expected)


def test_the_last_event_of_a_response() -> None:
    document = json.dumps({"type": "response.completed", "response": {"usage": usage_of(Api.RESPONSES, 96)}})
    expected = document.replace("96", "7")
    assert corrected(Api.RESPONSES, document.encode(), Usage(7)) == expected.encode()


# --- streams -----------------------------------------------------------------------------------------

_EVENT = b'data: {"id":"1","choices":[{"text":"\xc3\xa9"}]}'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":99,"prompt_tokens_details":{"cached_tokens": 96 }}}'
_RIGHT = _USAGE.replace(b" 96 ", b" 16 ")


async def _known() -> Usage | None:
    return Usage(16)


async def _edited(pieces: list[bytes]) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    edit = UsageEdit(Api.CHAT, _known)
    return [piece async for piece in edit.events(source())]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_any_cut_gives_the_same_bytes(data: st.DataObject, end: bytes, closed: bool) -> None:
    lines = [_EVENT, b"", _USAGE, b"", b": note", b"event: x", _EVENT, b"", _USAGE, b"", b"data: [DONE]", b""]
    whole = end.join(lines) + (end if closed else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
    assert b"".join(asyncio.run(_edited(pieces))) == whole.replace(_USAGE, _RIGHT)


async def test_a_complete_line_is_never_held() -> None:
    """Piece n comes out before piece n + 1 has been asked for."""
    asked = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal asked
        for piece in (_EVENT + b"\n\n", _USAGE + b"\n\n", _EVENT + b"\n\n" + _EVENT[:9], _EVENT[9:] + b"\n"):
            asked += 1
            yield piece

    seen = []
    async for piece in UsageEdit(Api.CHAT, _known).events(source()):
        seen.append((asked, piece))
    assert seen == [
        (1, _EVENT + b"\n\n"),
        (2, _RIGHT + b"\n\n"),
        (3, _EVENT + b"\n\n"),
        (4, _EVENT + b"\n"),
    ]


async def test_the_prefill_legs_figure_is_asked_for_once_and_only_if_needed() -> None:
    asked = 0

    async def usage() -> Usage | None:
        nonlocal asked
        asked += 1
        return None

    edit = UsageEdit(Api.CHAT, usage)

    async def source() -> AsyncIterator[bytes]:
        yield _EVENT + b"\n\n"
        assert asked == 0
        yield (_USAGE + b"\n\n") * 3

    whole = b"".join([piece async for piece in edit.events(source())])
    assert (asked, edit.corrections, whole.count(b'"cached_tokens": 0 ')) == (1, 3, 3)


async def test_a_line_over_the_limit_passes_unread() -> None:
    long = b'data: {"x":"' + b"y" * MAX_LINE_BYTES
    out = await _edited([long, b"y", _USAGE, b'"}\n', _USAGE + b"\n"])
    assert b"".join(out) == long + b"y" + _USAGE + b'"}\n' + _RIGHT + b"\n"


async def test_half_a_line_of_an_engine_that_broke_off_arrives() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"data: 1\n\ndata: {"
        raise ConnectionResetError

    out = []

    async def read() -> None:
        async for piece in UsageEdit(Api.CHAT, _known).events(source()):
            out.append(piece)

    with pytest.raises(ConnectionResetError):
        await read()
    assert out == [b"data: 1\n\n", b"data: {"]


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (200, {"Content-Type": "text/event-stream; charset=utf-8"}, Edit.EVENTS),
        (200, {"Content-Type": "application/json"}, Edit.DOCUMENT),
        (200, {"Content-Type": "application/json", "Content-Encoding": "gzip"}, None),
        (200, {"Content-Type": "text/plain"}, None),
        (200, {}, None),
        (400, {"Content-Type": "application/json"}, None),
    ],
)
def test_which_answers_are_looked_at(status: int, headers: dict[str, str], kind: Edit | None) -> None:
    assert edit_kind(status, CIMultiDict(headers)) is kind
