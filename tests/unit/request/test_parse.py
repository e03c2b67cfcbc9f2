"""Bodies, paths and headers of every shape: understood, routed by load, or refused fast and stably."""

from __future__ import annotations

import json
from array import array
from typing import Any

import orjson
import pytest

from epp.core.errors import BadRequest
from epp.request.parse import (
    MATCHED_PATHS,
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


def ids(*token_ids: int) -> TokenPrompt:
    return TokenPrompt(array("I", token_ids))


def parse(fields: dict[str, Any], path: str = COMPLETIONS) -> ParsedRequest:
    return parse_request(json.dumps({"model": "m"} | fields).encode(), path, JSON_HEADERS)


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
        ([151644, 8948, 198], ids(151644, 8948, 198), 1),
        ([[1, 2, 3], [4, 5, 6]], ids(1, 2, 3), 2),
        ([0, 2**32 - 1], ids(0, 2**32 - 1), 1),
    ],
)
def test_s_b01_the_four_forms_of_a_prompt(prompt: object, expected: object, count: int) -> None:
    """S-B02, too: the first prompt decides, token ids are taken as they are."""
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
        ({"suffix": "end"}, "suffix"),
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
def test_s_b12_messages_are_not_normalised(content: object) -> None:
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
        ({"messages": [1], "truncate_prompt_tokens": 9}, "truncated_prompt"),
        ({"messages": [1], "tools": [{"function": {"parameters": {"maximum": 2**64}}}]}, "number_range"),
        ({"messages": [1], "chat_template_kwargs": {"budget": 2**70}}, "number_range"),
    ],
)
def test_chats_left_to_the_engine(fields: dict[str, Any], reason: str) -> None:
    request = parse(fields, CHAT)
    assert request.prompt is None
    assert request.no_prompt == reason


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image"),
        ({"type": "image_url", "image_url": None, "uuid": "picture-1"}, "image"),
        ({"type": "image_url", "image_url": {"url": "u"}, "detail": "high"}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "http://x"}}, "video"),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_items_are_named_wherever_they_stand(part: dict[str, Any], kind: str, role: str) -> None:
    messages = [
        {"role": "user", "content": "long text before"},
        {"role": role, "content": [{"type": "text", "text": "a"}, part]},
    ]
    expected = ChatPrompt(messages, items=frozenset((kind,)))
    assert parse({"messages": messages}, CHAT).prompt == expected


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": "http://x"},
        {"type": "image_url", "audio_url": "http://x", "uuid": "1"},
        {"type": "image_url", "image_url": {"url": "u"}, "video_url": {"url": "v"}},
        {"type": "image_url"},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "prompt_embeds", "data": "AAAA"},
        {"type": "text", "text": "a", "uuid": "1"},
        {"type": "text", "text": "a", "image_url": "u"},
        {"type": "input_image"},
        {"type": 5},
    ],
)
def test_items_that_an_engine_might_read_otherwise_have_no_prompt(part: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "long text before"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    assert parse({"messages": messages}, CHAT).no_prompt == "multimodal"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_are_no_media(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, "text": "image_url"}, "plain"]}]
    assert parse({"messages": messages}, CHAT).prompt == ChatPrompt(messages)


# --- token ids in -----------------------------------------------------------------------------------

GENERATE = "/inference/v1/generate"


def test_token_ids_of_the_token_in_api_are_used_as_they_are() -> None:
    request = parse({"token_ids": [5, 6, 7], "sampling_params": {}, "cache_salt": "s"}, GENERATE)
    assert (request.kind, request.prompt) == (RequestKind.TOKENS_IN, ids(5, 6, 7))
    assert request.cache_salt == "s"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "prompt_shape"),
        ({"token_ids": []}, "prompt_shape"),
        ({"token_ids": [1, "a"]}, "prompt_shape"),
        ({"token_ids": [True]}, "prompt_shape"),
        ({"token_ids": [[1]]}, "prompt_shape"),
        ({"token_ids": [-1]}, "token_range"),
        ({"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}, "multimodal"),
        ({"token_ids": [1], "content_parts": [{}]}, "multimodal"),
    ],
)
def test_token_in_requests_left_to_the_engine(fields: dict[str, Any], reason: str) -> None:
    assert parse(fields, GENERATE).no_prompt == reason


# --- other paths and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/pooling",
        "/tokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/responses/resp_1/cancel",
    ],
)
def test_s_b08_other_paths_are_routed_by_load_with_their_model(path: str) -> None:
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
        ("/v1/responses", RequestKind.RESPONSES),
        ("/v1/messages", RequestKind.MESSAGES),
        ("/inference/v1/generate", RequestKind.TOKENS_IN),
    ],
)
def test_paths(path: str, kind: RequestKind) -> None:
    assert parse({"prompt": "a"}, path).kind is kind


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models"])
def test_bodiless_requests_are_routed_by_load(path: str) -> None:
    request = parse_request(b"", path, {})
    assert request.prompt is None
    assert request.no_prompt == "no_body"


# --- broken bodies (S-B10) -------------------------------------------------------------------------

SECRET = "zebra-prompt-4711"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "m", "prompt": "zebra-prompt-4711",}',
        b'{"model": "m", "prompt": zebra-prompt-4711}',
        b'{"model": "m", "prompt": "zebra-prompt-4711 \xe9"}',
        b"zebra-prompt-4711",
        b"\x00\x01\x02zebra-prompt-4711",
    ],
)
@pytest.mark.parametrize("path", MATCHED_PATHS)
def test_s_b10_broken_bodies_are_refused_without_an_echo(body: bytes, path: str) -> None:
    with pytest.raises(BadRequest) as first:
        parse_request(body, path, JSON_HEADERS)
    with pytest.raises(BadRequest) as second:
        parse_request(body, path, JSON_HEADERS)
    assert str(first.value) == str(second.value)
    assert SECRET not in str(first.value)
    assert len(str(first.value)) < 100
    assert first.value.status == 400
    assert first.value.__cause__ is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[]", "json_shape"),
        (b'"zebra"', "json_shape"),
        (b"null", "json_shape"),
        (b'{"prompt": "a", "model": 5}', "model_shape"),
        (b'{"prompt": "a", "model": ["m"]}', "model_shape"),
        (b'{"deep": ' + b"[" * 100_000, "body_density"),
        (b'{"deep": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "json_shape"),  # for us, not for every parser
        (b'{"prompt": "a", "n": ' + b"9" * 5_000 + b"}", "json_shape"),
    ],
)
@pytest.mark.parametrize("path", MATCHED_PATHS)
def test_what_is_json_is_never_refused_by_us(body: bytes, path: str, reason: str) -> None:
    request = parse_request(body, path, JSON_HEADERS)
    assert (request.prompt, request.no_prompt, request.model) == (None, reason, "")


@pytest.mark.parametrize("model", [b"", b', "model": null', b', "model": ""'])
def test_no_model_means_the_base_model(model: bytes) -> None:
    request = parse_request(b'{"prompt": "a"' + model + b"}", COMPLETIONS, JSON_HEADERS)
    assert (request.model, request.prompt) == ("", TextPrompt("a"))


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
