"""Bodies, paths and headers of every shape: understood, routed by load, or refused fast and stably."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.errors import BadRequest
from epp.request.parse import (
    ChatPrompt,
    ParsedRequest,
    RequestKind,
    TextPrompt,
    TokenPrompt,
    parse_request,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON_HEADERS = {"content-type": "application/json"}


def parse(fields: dict[str, Any], path: str = COMPLETIONS) -> ParsedRequest:
    return parse_request(orjson.dumps({"model": "m"} | fields), path, JSON_HEADERS)


# --- completions -----------------------------------------------------------------------------------


def test_text_prompt() -> None:
    request = parse({"prompt": "Hello", "stream": True, "cache_salt": "tenant-a"})
    assert request.kind is RequestKind.COMPLETION
    assert request.model == "m"
    assert request.prompt == TextPrompt("Hello", add_special_tokens=True)
    assert request.stream
    assert request.cache_salt == "tenant-a"
    assert request.size_bytes > 0


@pytest.mark.parametrize(
    ("prompt", "expected", "count"),
    [
        ("a", TextPrompt("a"), 1),
        ("", TextPrompt(""), 1),
        (["a", "b"], TextPrompt("a"), 2),
        ([151644, 8948, 198], TokenPrompt([151644, 8948, 198]), 1),
        ([[1, 2, 3], [4, 5, 6]], TokenPrompt([1, 2, 3]), 2),
        ([0, 2**32 - 1], TokenPrompt([0, 2**32 - 1]), 1),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: object, expected: object, count: int) -> None:
    """S-B01, S-B02: the first prompt decides, token ids are taken as they are."""
    request = parse({"prompt": prompt})
    assert request.prompt == expected
    assert request.prompts == count
    assert request.no_prompt is None


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "prompt_shape"),
        ([[]], "prompt_shape"),
        ([[1], []], "prompt_shape"),
        ([1, "a"], "prompt_shape"),
        (["a", 1], "prompt_shape"),
        ([[1, "a"]], "prompt_shape"),
        ([True, False], "prompt_shape"),
        ([1.5], "prompt_shape"),
        (None, "prompt_shape"),
        ({"text": "a"}, "prompt_shape"),
        ([-1], "token_range"),
        ([2**32], "token_range"),
    ],
)
def test_illegal_prompts_are_left_to_the_engine(prompt: object, reason: str) -> None:
    request = parse({"prompt": prompt})
    assert request.prompt is None
    assert request.no_prompt == reason
    assert request.model == "m"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": "xx"}, "prompt_embeds"),
        ({"truncate_prompt_tokens": 5}, "truncated_prompt"),
        ({"add_special_tokens": "yes"}, "flag_shape"),
        ({"cache_salt": ""}, "cache_salt_shape"),
        ({"cache_salt": 7}, "cache_salt_shape"),
        ({"cache_salt": "x" * 1025}, "cache_salt_shape"),
    ],
)
def test_fields_that_change_the_tokens_or_are_refused_mean_no_match(
    fields: dict[str, Any], reason: str
) -> None:
    request = parse({"prompt": "Hello"} | fields)
    assert request.prompt is None
    assert request.no_prompt == reason


def test_add_special_tokens_is_honoured() -> None:
    assert parse({"prompt": "a", "add_special_tokens": False}).prompt == TextPrompt("a", False)


# --- chat ------------------------------------------------------------------------------------------


def test_chat_with_everything() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = parse(
        {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": True, "documents": 1},
            "documents": [{"text": "d"}],
        },
        CHAT,
    )
    assert request.kind is RequestKind.CHAT
    assert request.prompt == ChatPrompt(
        messages,
        tools,
        add_generation_prompt=False,
        continue_final_message=True,
        template_kwargs={"enable_thinking": False, "documents": [{"text": "d"}]},
        add_special_tokens=False,
    )


@pytest.mark.parametrize(("effort", "thinking"), [("high", True), ("none", False)])
def test_reasoning_effort_switches_thinking(effort: str, thinking: bool) -> None:
    prompt = parse({"messages": [{"role": "user"}], "reasoning_effort": effort}, CHAT).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"reasoning_effort": effort, "enable_thinking": thinking}


@pytest.mark.parametrize("content", ["", None, [], ...])
def test_messages_are_not_normalised(content: object) -> None:
    """S-B12: the parser keeps what the client wrote."""
    message = {"role": "user"} if content is ... else {"role": "user", "content": content}
    prompt = parse({"messages": [message]}, CHAT).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [message]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "messages_shape"),
        ({"messages": []}, "messages_shape"),
        ({"messages": "hi"}, "messages_shape"),
        ({"messages": [1], "tools": {}}, "tools_shape"),
        ({"messages": [1], "chat_template": "{{ x }}"}, "request_chat_template"),
        ({"messages": [1], "chat_template_kwargs": []}, "template_kwargs"),
        ({"messages": [1], "chat_template_kwargs": {"messages": []}}, "template_kwargs"),
        ({"messages": [1], "chat_template_kwargs": {"self": 1}}, "template_kwargs"),
        ({"messages": [1], "add_generation_prompt": 1}, "flag_shape"),
    ],
)
def test_chats_left_to_the_engine(fields: dict[str, Any], reason: str) -> None:
    request = parse(fields, CHAT)
    assert request.prompt is None
    assert request.no_prompt == reason


# --- other paths and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages", "/v1/responses"]
)
def test_other_paths_are_routed_by_load_with_their_model(path: str) -> None:
    """S-B08."""
    request = parse({"input": "x"}, path)
    assert (request.kind, request.model, request.prompt) == (RequestKind.OTHER, "m", None)


@pytest.mark.parametrize("body", [b"{", b"--boundary\r\n", b"[1]", b'{"model": 5}', b"\xff\xfe", b"   {}"])
def test_other_paths_are_never_refused(body: bytes) -> None:
    request = parse_request(body, "/v1/audio/transcriptions", {"content-type": "multipart/form-data"})
    assert request.kind is RequestKind.OTHER
    assert request.model == ""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions?x=1", RequestKind.COMPLETION),
        ("/v1/completions/", RequestKind.COMPLETION),
        ("/team/v1/chat/completions", RequestKind.CHAT),
        ("/v1/completions/render", RequestKind.OTHER),
        ("/notv1/completions", RequestKind.OTHER),
        ("", RequestKind.OTHER),
    ],
)
def test_paths(path: str, kind: RequestKind) -> None:
    assert parse({"prompt": "a"}, path).kind is kind


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models"])
def test_bodiless_requests_are_routed_by_load(path: str) -> None:
    request = parse_request(b"", path, {})
    assert request.prompt is None
    assert request.no_prompt == "no_body"


def test_compressed_bodies_are_routed_by_load() -> None:
    request = parse_request(b"\x1f\x8b...", COMPLETIONS, JSON_HEADERS | {"content-encoding": "gzip"})
    assert request.no_prompt == "encoded_body"


# --- broken bodies (S-B10) -------------------------------------------------------------------------

SECRET = "zebra-prompt-4711"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "m", "prompt": "zebra-prompt-4711",}',
        b'{"model": "m", "prompt": zebra-prompt-4711}',
        b'{"zebra-prompt-4711": ' + b"[" * 100_000,
        b'{"model": "m", "prompt": "zebra-prompt-4711 \xe9"}',
        b"zebra-prompt-4711",
        b"\x00\x01\x02zebra-prompt-4711",
        b"[]",
        b'"zebra-prompt-4711"',
        b"null",
        b'{"prompt": "zebra-prompt-4711"}',
        b'{"prompt": "zebra-prompt-4711", "model": 5}',
        b'{"prompt": "zebra-prompt-4711", "model": ""}',
        b'{"model": "m", "prompt": [' + b"9" * 5000 + b"]}",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_broken_bodies_are_refused_without_an_echo(body: bytes, path: str) -> None:
    with pytest.raises(BadRequest) as first:
        parse_request(body, path, JSON_HEADERS)
    with pytest.raises(BadRequest) as second:
        parse_request(body, path, JSON_HEADERS)
    assert str(first.value) == str(second.value)
    assert SECRET not in str(first.value)
    assert len(str(first.value)) < 100
    assert first.value.status == 400
    assert first.value.__cause__ is None


def test_a_missing_model_is_named() -> None:
    with pytest.raises(BadRequest, match="`model`"):
        parse_request(b'{"prompt": "a"}', COMPLETIONS, JSON_HEADERS)


def test_what_the_engine_reads_is_read() -> None:
    """A byte order mark, NaN, UTF-16 and a lone surrogate: Python's json accepts them, so do we."""
    plain = json.dumps({"model": "m", "prompt": "Hello", "temperature": float("nan")})
    for body in (plain.encode(), b"\xef\xbb\xbf" + plain.encode(), plain.encode("utf-16")):
        assert parse_request(body, COMPLETIONS, JSON_HEADERS).prompt == TextPrompt("Hello")
    body = b'{"model": "m", "prompt": "\\ud800"}'
    assert parse_request(body, COMPLETIONS, JSON_HEADERS).prompt == TextPrompt("\ud800")


def test_large_bodies_are_not_tried_twice() -> None:
    body = b"\xef\xbb\xbf" + orjson.dumps({"model": "m", "prompt": "x" * (1 << 20)})
    request = parse_request(body, COMPLETIONS, JSON_HEADERS)
    assert request.no_prompt == "lenient_json_size"


def test_a_foreign_content_type_is_left_to_the_engine() -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert parse_request(b"a=b", COMPLETIONS, headers).no_prompt == "content_type"
    body = orjson.dumps({"model": "m", "prompt": "a"})
    assert parse_request(body, COMPLETIONS, headers).prompt == TextPrompt("a")


def test_repr_shows_no_prompt() -> None:
    for fields in ({"prompt": SECRET}, {"prompt": [4711, 4712]}):
        assert "4711" not in repr(parse(fields | {"cache_salt": SECRET}))
    chat = {"messages": [{"role": "user", "content": SECRET}], "chat_template_kwargs": {"a": SECRET}}
    assert SECRET not in repr(parse(chat, CHAT))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
NAMES = ["prompt", "messages", "tools", "cache_salt", "stream", "add_special_tokens", "chat_template_kwargs"]


@given(st.dictionaries(st.sampled_from(NAMES), JSON), st.sampled_from([COMPLETIONS, CHAT, "/v1/x"]))
def test_any_json_with_a_model_is_routed(fields: dict[str, Any], path: str) -> None:
    body = json.dumps({"model": "m"} | fields).encode()
    request = parse_request(body, path, JSON_HEADERS)
    assert (request.prompt is None) == (request.no_prompt is not None)


@given(st.binary(max_size=64), st.sampled_from([COMPLETIONS, CHAT, "/v1/x"]))
def test_any_bytes_are_routed_or_refused(body: bytes, path: str) -> None:
    try:
        parse_request(body, path, JSON_HEADERS)
    except BadRequest:
        assert path != "/v1/x"
