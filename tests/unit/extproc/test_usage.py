"""Usage and first-token detection: any cut, any shape, bounded memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.extproc.usage import OutputDetector, TokenUsage, UsageScanner
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


# --- usage of the other APIs -------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), max_size=6))
def test_responses_usage_under_any_cut(cuts: list[int]) -> None:
    created = b'event: response.created\ndata: {"response":{"tools":[],"usage":null}}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"delta":"\\"usage\\":{\\"input_tokens\\":9}"}\n\n'
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cached_tokens_per_turn": [64]},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 107,
    }
    completed = json.dumps({"response": {"output": [], "usage": usage, "user": None}}).encode()
    body = created + delta + b"event: response.completed\ndata: " + completed + b"\n\n"
    assert scan(*cut(body, cuts)) == TokenUsage(100, 7, 64)


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), max_size=6), st.booleans())
def test_anthropic_usage_under_any_cut(cuts: list[int], in_the_end: bool) -> None:
    """Input without what was cached, in the first event; output in the last one, which may repeat all."""
    first = {"input_tokens": 36, "output_tokens": 0, "cache_read_input_tokens": 64}
    last = {"output_tokens": 7} | (first | {"output_tokens": 7} if in_the_end else {})
    start = json.dumps({"type": "message_start", "message": {"content": [], "usage": first}}).encode()
    delta = json.dumps({"type": "message_delta", "delta": {}, "usage": last}).encode()
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    body = (
        b"event: message_start\ndata: " + start + b"\n\nevent: message_delta\ndata: " + delta + b"\n\n" + stop
    )
    assert scan(*cut(body, cuts)) == TokenUsage(100, 7, 64)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 5, "output_tokens": 2}, TokenUsage(5, 2, None)),
        ({"input_tokens": 5, "cache_creation_input_tokens": 3}, TokenUsage(8, None, None)),
        ({"input_tokens": "5", "cache_read_input_tokens": 3}, TokenUsage(None, None, 3)),
        ({"input_tokens": 5, "cache_read_input_tokens": None}, TokenUsage(5, None, None)),
        ({"input_tokens": 5, "input_tokens_details": []}, TokenUsage(5, None, None)),
        ({"prompt_tokens": 10**9 + 1, "completion_tokens": 10**30}, TokenUsage()),
    ],
)
def test_s_h05_odd_usage_costs_only_the_metric(usage: dict[str, object], expected: TokenUsage) -> None:
    assert scan(json.dumps({"usage": usage}).encode()) == expected


OTHER_LINES = [
    *(b": keep-alive", b"id: 7", b"retry: 1", b"event: x", b"data: [DONE]"),
    *(b': "usage":{"prompt_tokens":5', b': "usage":', b'data: {"usage":{"a":"}'),  # that event ends, too
]


@settings(deadline=None)
@given(
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"data:", b"data: "]),
    st.lists(
        st.sampled_from([b": keep-alive", b"id: 7", b"retry: 1", b"event: x", b"data: [DONE]"]), max_size=3
    ),
    st.integers(0, 3),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_usage_in_an_event_of_several_data_lines_under_any_cut(
    end: bytes, field: bytes, others: list[bytes], indent: int, cuts: list[int]
) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
    lines = json.dumps({"choices": [], "usage": usage}, indent=indent).encode().split(b"\n")
    event = b"".join(field + line + end for line in lines) + end
    body = b"".join(other + end * 2 for other in others) + event + b"data: [DONE]" + end * 2
    assert scan(*cut(body, cuts)) == TokenUsage(9, 4, 3)
    assert scan(*(bytes([byte]) for byte in body)) == TokenUsage(9, 4, 3)


# --- moments of output -------------------------------------------------------------------------------

QUIET = [b": c", b"event: x", b"event:", b"id: data:", b"xdata: 1", b"", b"event: " + b"y" * 100 + b"data:"]
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@settings(deadline=None)
@given(st.lists(st.sampled_from(QUIET), max_size=5), ENDS, st.lists(st.integers(0, 200), max_size=6))
def test_first_data_line_under_any_cut(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    quiet = b"".join(line + end for line in lines)
    detector = OutputDetector()
    assert not any(detector.feed(part) for part in cut(quiet, cuts))
    fired = [detector.feed(part) for part in cut(b"data: {}" + end, [1, 3])]
    assert fired == [False, False, True]


@settings(deadline=None)
@given(ENDS, st.lists(st.integers(0, 300), max_size=8))
def test_events_before_any_output_do_not_count(end: bytes, cuts: list[int]) -> None:
    """/v1/responses says at once that it has begun: that is no first token."""
    names = [b"response.created", b"response.in_progress", b"ping"]
    quiet = b"".join(b"event: " + name + end + b'data: {"a":1}' + end * 2 for name in names)
    detector = OutputDetector()
    assert not any(detector.feed(part) for part in cut(quiet, cuts))
    assert detector.feed(b"event: response.output_text.delta" + end + b"data: {}" + end)
    assert detector.feed(b"data: no event line" + end)


@settings(deadline=None)
@given(ENDS, st.integers(1, 8), st.lists(st.integers(0, 100), max_size=8))
def test_every_data_line_counts_once_under_any_cut(end: bytes, lines: int, cuts: list[int]) -> None:
    body = (b"data: {}" + end * 2) * lines
    detector = OutputDetector()
    fired = sum(detector.feed(bytes([byte])) for byte in body)
    assert fired == lines
    again = OutputDetector()
    parts = cut(body, cuts)
    assert sum(map(again.feed, parts)) <= len(parts)
    assert len(again._carry) <= 65
