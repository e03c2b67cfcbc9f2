"""Bodies that would stop the loop are not parsed: by size, by structure, and not tried twice."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from epp.core.errors import BadRequest
from epp.request import body as bodies
from epp.request.body import (
    COUNTED_FROM_BYTES,
    LENIENT_MAX_DIGITS,
    LENIENT_MAX_VALUES,
    MAX_CONTAINERS,
    MAX_MEMBERS,
    MAX_PARSED_BYTES,
    MAX_SEPARATORS,
    load_object,
)
from epp.request.parse import MATCHED_PATHS, parse_request
from epp.request.prompts import NoPrompt

HEADERS = {"content-type": "application/json"}


class Parsed(Exception):
    """The parser was called."""


@pytest.fixture
def no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused by a bound must not be parsed first."""

    def parsed(_: bytes) -> Any:
        raise Parsed

    monkeypatch.setattr(bodies, "_load", parsed)


def of_size(size_bytes: int) -> bytes:
    head, tail = b'{"model": "m", "prompt": "', b'"}'
    return head + b"x" * (size_bytes - len(head) - len(tail)) + tail


@pytest.mark.usefixtures("no_parser")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (of_size(MAX_PARSED_BYTES + 1), "body_size"),
        (of_size(33 << 20), "body_size"),
        (b'{"model": "m", "prompt": [' + b"{}," * (MAX_CONTAINERS + 1), "body_density"),
        (b'{"model": "m", "prompt": [' + b"[]," * (MAX_CONTAINERS + 1), "body_density"),
        (b'{"model": "m", "prompt": [' + b"1," * (MAX_SEPARATORS + 1), "body_density"),
        (b'{"model": "m"' + b',"k":1' * MAX_MEMBERS + b"}", "body_density"),
    ],
)
@pytest.mark.parametrize("path", [*MATCHED_PATHS, "/v1/embeddings"])
def test_large_bodies_are_not_parsed(body: bytes, reason: str, path: str) -> None:
    request = parse_request(body, path, HEADERS)
    assert request.prompt is None
    assert request.no_prompt == (reason if path in MATCHED_PATHS else "path")
    assert request.size_bytes == len(body)


def test_the_bounds_themselves_are_parsed() -> None:
    assert load_object(of_size(MAX_PARSED_BYTES))["model"] == "m"
    containers = b'{"a": [' + b"{}," * (MAX_CONTAINERS - 3) + b"{}]}"
    assert len(containers) > COUNTED_FROM_BYTES
    assert len(load_object(containers)["a"]) == MAX_CONTAINERS - 2
    ids = orjson.dumps({"prompt": [7] * 131_072})
    assert len(load_object(ids)["prompt"]) == 131_072


@pytest.mark.parametrize(
    "piece", ['{"a": [1, 2, {"b": []}]}\n', "if (a[0]) { f(b, c); }\n", "\\", '"', '{[,\\"', 'x\\"{']
)
def test_a_long_text_full_of_structure_is_no_dense_body(piece: str) -> None:
    """JSON and code as a text, in a message: the brackets are no values."""
    text = (
        piece * (600_000 // len(piece))
        + "{" * (MAX_CONTAINERS + 1)
        + "," * (MAX_SEPARATORS + 1)
        + ":" * (MAX_MEMBERS + 1)
    )
    body = orjson.dumps({"prompt": text, "more": [text[:1000]]})
    assert load_object(body) == {"prompt": text, "more": [text[:1000]]}


@pytest.mark.usefixtures("no_parser")
@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b'"{",' * (MAX_CONTAINERS + 1) + b"1]}",  # as many texts as brackets in them
        b'{"a": "' + b'\\"{' * 10 + b'", "b": [' + b"[]," * (MAX_CONTAINERS + 1) + b"1]}",
        b'{"a": "\\\\", "b": [' + b"[]," * (MAX_CONTAINERS + 1) + b"1]}",
        b'{"": 1' + b',"":1' * MAX_MEMBERS + b"}",
    ],
)
def test_structure_beside_texts_is_found(body: bytes) -> None:
    with pytest.raises(NoPrompt, match="body_density"):
        load_object(body)


@pytest.mark.parametrize(
    "body", [b'"' + b'\\"' * 2_000_000, b'"' + b"\\" * 3_999_999, b'{"' * 100_000, b'"{' * 40_000 + b'"\\']
)
def test_counting_is_linear_in_hostile_bytes(body: bytes) -> None:
    """Each of these would keep a careless pattern busy for hours."""
    with pytest.raises((NoPrompt, BadRequest)):
        load_object(body + b"{" * (MAX_CONTAINERS + 1))


def test_a_lenient_parser_is_tried_on_small_bodies_only() -> None:
    small = json.dumps({"prompt": "\ud800" * 10}).encode()
    assert load_object(small) == {"prompt": "\ud800" * 10}
    large = json.dumps({"prompt": "\ud800" * 200_000}).encode()
    with pytest.raises(NoPrompt, match="lenient_json_size"):
        load_object(large)
    with pytest.raises(BadRequest):
        load_object(b'{"a": 1')


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": NaN, "prompt": [' + b"1," * LENIENT_MAX_VALUES + b"1]}", "lenient_json_size"),
        (b'{"a": NaN, "prompt": [' + b"[]," * (LENIENT_MAX_VALUES // 2) + b"1]}", "lenient_json_size"),
        (json.dumps({"prompt": [1] * LENIENT_MAX_VALUES}).encode("utf-16"), "lenient_json_size"),
        (b'{"a": NaN, "b": ' + b"9" * (LENIENT_MAX_DIGITS + 1) + b"}", "json_shape"),
        (b'{"a": NaN, "b": [' + b"9" * 4299 + b"," + b"9" * 4299 + b"]}", "json_shape"),
    ],
)
def test_the_lenient_parser_gets_less_than_would_stop_the_loop(body: bytes, reason: str) -> None:
    """It takes five times as long for a value, and a third of a millisecond for 4,300 digits."""
    with pytest.raises(NoPrompt, match=reason):
        load_object(body)


def test_what_the_lenient_parser_may_read_is_read_as_the_engine_does() -> None:
    exact = b'{"a": NaN, "b": ' + b"9" * LENIENT_MAX_DIGITS + b', "c": [' + b"1," * 40_000 + b"1]}"
    found = load_object(exact)
    assert found["b"] == 10**LENIENT_MAX_DIGITS - 1
    assert len(found["c"]) == 40_001
