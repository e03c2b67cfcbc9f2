"""Usage and first-token detection: any cut, any shape, bounded memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.extproc.usage import FirstDataDetector, TokenUsage, UsageScanner
from tests.unit.extproc.gateway import cut

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just('"usage": {"'),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6).filter(lambda key: key != "usage"), inner, max_size=3)
    ),
    max_leaves=10,
)


def scan(*parts: bytes) -> TokenUsage:
    scanner = UsageScanner()
    for part in parts:
        scanner.feed(part)
    return scanner.usage


@settings(deadline=None)
@given(
    before=json_values,
    after=json_values,
    counts=st.tuples(*[st.integers(0, 10**6)] * 3),
    indent=st.none() | st.integers(0, 4),
    cuts=st.lists(st.integers(0, 600), max_size=8),
)
def test_found_in_any_json_under_any_cut(
    before: object, after: object, counts: tuple[int, int, int], indent: int | None, cuts: list[int]
) -> None:
    prompt, completion, cached = counts
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "note": 'odd } and " and {',
    }
    body = json.dumps({"choices": before, "usage": usage, "z": after}, indent=indent).encode()
    assert scan(*cut(body, cuts)) == TokenUsage(prompt, completion, cached)


@settings(deadline=None)
@given(json_values, st.lists(st.integers(0, 300), max_size=4))
def test_text_that_looks_like_usage_is_not(value: object, cuts: list[int]) -> None:
    body = json.dumps({"choices": value, "text": '"usage": {"prompt_tokens": 5}'}).encode()
    assert scan(*cut(body, cuts)) == TokenUsage()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ('{"usage":{"prompt_tokens":"12","completion_tokens":3}}', TokenUsage(None, 3, None)),
        ('{"usage":{"prompt_tokens":true,"completion_tokens":-1}}', TokenUsage()),
        ('{"usage":{"prompt_tokens":1.5,"prompt_tokens_details":7}}', TokenUsage()),
        ('{"usage":{"prompt_tokens_details":{"cached_tokens":9}}}', TokenUsage(None, None, 9)),
        ('{"usage":[1]}', TokenUsage()),
        ('{"usage":"none"}', TokenUsage()),
        ('{"usage":{"prompt_tokens":1', TokenUsage()),
        ('"usage"', TokenUsage()),
        ('{"x":"usage","usage":{"prompt_tokens":4}}', TokenUsage(4)),
    ],
)
def test_wrong_shapes_cost_only_the_metric(raw: str, expected: TokenUsage) -> None:
    assert scan(raw.encode()) == expected
    assert scan(*(bytes([byte]) for byte in raw.encode())) == expected


def test_the_last_usage_counts() -> None:
    events = b"".join(b'data: {"usage":{"completion_tokens":%d}}\n\n' % n for n in range(1, 4))
    assert scan(events).completion_tokens == 3


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_any_bytes_never_raise(data: bytes, cuts: list[int]) -> None:
    scan(*cut(b'{"usage":{' + data, cuts))


def test_an_endless_object_is_given_up_and_the_next_one_found() -> None:
    scanner = UsageScanner()
    scanner.feed(b'{"usage":{"a":"')
    for _ in range(50):
        scanner.feed(b"x" * 1000)
        assert len(scanner._carry) <= 9_200
    scanner.feed(b'"}} {"usage":{"prompt_tokens":6}}')
    assert scanner.usage.prompt_tokens == 6


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([b": c", b"event: x", b"id: data:", b"xdata: 1", b""]), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 80), max_size=6),
)
def test_first_data_line_under_any_cut(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    quiet = b"".join(line + end for line in lines)
    detector = FirstDataDetector()
    assert not any(detector.feed(part) for part in cut(quiet, cuts))
    fired = [detector.feed(part) for part in cut(b"data: {}" + end, [1, 3])]
    assert any(fired)
