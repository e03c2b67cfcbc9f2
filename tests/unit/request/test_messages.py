"""Anthropic /v1/messages: blocks to the messages that the engine renders (vLLM 0.32), or a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.request.chat import engine_messages
from epp.request.parse import ChatPrompt, ParsedRequest, RequestKind, parse_request

USER = {"role": "user", "content": "Q"}


def parse(**fields: Any) -> ParsedRequest:
    body = json.dumps({"model": "m", "max_tokens": 9} | fields).encode()
    return parse_request(body, "/v1/messages", {"content-type": "application/json"})


def chat(**fields: Any) -> ChatPrompt:
    request = parse(**fields)
    assert request.no_prompt is None
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_s_b04_system_text_and_messages() -> None:
    request = parse(system="Be brief.", messages=[USER], stream=True, cache_salt="s")
    assert request.kind is RequestKind.MESSAGES
    assert (request.stream, request.cache_salt) == (True, "s")
    assert request.prompt == ChatPrompt([{"role": "system", "content": "Be brief."}, USER])


def test_system_blocks_are_joined_without_the_billing_line() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1"), text("One."), text(""), text("Two.")]
    assert chat(system=blocks, messages=[USER]).messages[0]["content"] == "One.Two."


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ("x-anthropic-billing-header: 1\nRest", "Rest"),
        ("x-anthropic-billing-header: 1", ""),
        ("x-anthropic-billing-header: 1\nx-anthropic-billing-header: 2\nRest", None),
    ],
)
def test_a_billing_line_is_taken_out_once(system: str, left: str | None) -> None:
    """Where every chat's is: a second one stays."""
    prompt = chat(system=system, messages=[USER])
    shown = engine_messages(prompt.messages, "string")[0]["content"]
    assert shown == ("x-anthropic-billing-header: 2\nRest" if left is None else left)


@pytest.mark.parametrize("system", [None, "", [], [text("x-anthropic-billing-header")]])
def test_an_empty_system_is_no_message(system: object) -> None:
    assert chat(system=system, messages=[USER]).messages == [USER]


def test_a_turn_with_tools() -> None:
    messages = [
        {"role": "user", "content": [text("What is"), text("the weather?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "thinking", "thinking": "m"},
                text("Let me see."),
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": [2]}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                text("Here:"),
                {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")]},
            ],
        },
    ]
    prompt = chat(messages=messages)
    assert prompt.messages == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the weather?"}],
        },
        {
            "role": "assistant",
            "reasoning": "hmm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"b": 1, "a": [2]}},
                },
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
            "content": "Let me see.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
        {"role": "user", "content": "Here:"},
    ]
    assert list(prompt.messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


def test_results_alone_are_no_user_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    assert chat(messages=[{"role": "user", "content": [result]}]).messages == [
        {"role": "tool", "tool_call_id": "t1", "content": ""}
    ]


def test_empty_contents() -> None:
    """An assistant without blocks keeps its turn, a user without blocks has none."""
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": []}]
    assert chat(messages=[*messages, {"role": "user", "content": []}]).messages == [
        {"role": "user", "content": ""},
        {"role": "assistant"},
    ]


def test_a_result_in_an_assistant_message_is_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "42"}
    assert chat(messages=[{"role": "assistant", "content": [result]}]).messages == [
        {"role": "assistant", "content": "Tool result: 42"}
    ]


def test_a_list_of_results_in_an_assistant_message_is_text_as_the_engine_writes_it() -> None:
    result = {"type": "tool_result", "content": [{"type": "text", "text": "it's"}, {"n": [1.0, None]}]}
    shown = """Tool result: [{'type': 'text', 'text': "it's"}, {'n': [1.0, None]}]"""
    assert chat(messages=[{"role": "assistant", "content": [result]}]).messages == [
        {"role": "assistant", "content": shown}
    ]
    empty = {"type": "tool_result", "content": []}
    assert (
        chat(messages=[{"role": "assistant", "content": [empty]}]).messages[0]["content"] == "Tool result: "
    )


def test_tools_that_a_result_names_come_behind_its_text() -> None:
    content = [
        {"type": "tool_reference", "tool_name": "f", "name": "g"},
        text("Found:"),
        {"type": "tool_reference", "name": "g"},
        {"type": "tool_reference"},
        {"type": "search_result", "title": "left out"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    outside = {"type": "tool_reference", "tool_name": "h"}
    named = [{"type": "tool_reference", "name": name} for name in ("f", "g")]
    assert chat(messages=[{"role": "user", "content": [result, outside]}]).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "Found:"},
        {"role": "tool", "tool_call_id": "t", "content": named},
    ]


def test_tools_are_rendered_in_the_form_of_the_chat_api() -> None:
    schema = {"properties": {"b": {}, "a": {}}}
    tools = [{"input_schema": schema, "name": "f", "description": "d", "cache_control": {}}]
    prompt = chat(messages=[USER], tools=tools)
    assert prompt.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": schema | {"type": "object"}},
        }
    ]
    assert list(prompt.tools[0]["function"]["parameters"]) == ["properties", "type"]
    assert chat(messages=[USER], tools=[]).tools == []


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"output_config": {"format": {}}, "chat_template_kwargs": {"x": 1}}, {"x": 1}),
    ],
)
def test_what_reaches_the_template(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert chat(messages=[USER], **fields).template_kwargs == kwargs


def test_disabled_thinking_and_unused_tools_wait_for_the_engine_s_flags() -> None:
    asked = chat(messages=[USER], thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert (asked.thinking_disabled, asked.template_kwargs) == (True, {})
    assert not chat(messages=[USER], thinking={"type": "enabled"}).thinking_disabled
    assert chat(messages=[USER], tool_choice={"type": "none"}).tools_off
    assert not chat(messages=[USER], tool_choice={"type": "auto"}).tools_off


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": None}, "messages_shape"),
        ({"messages": []}, "messages_shape"),
        ({"messages": ["Q"]}, "messages_shape"),
        ({"messages": [{"role": "user", "content": None}]}, "messages_shape"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages_shape"),
        ({"messages": [USER, {"role": "system", "content": None}]}, "messages_shape"),
        ({"system": {"text": "x"}}, "messages_shape"),
        ({"system": [{"type": "image"}]}, "messages_shape"),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": None}},
            "template_kwargs",
        ),
        ({"thinking": {"type": "odd"}}, "reasoning_shape"),
        ({"thinking": "on"}, "reasoning_shape"),
        ({"output_config": {"effort": "huge"}}, "reasoning_shape"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools_shape"),
        ({"tools": {}}, "tools_shape"),
        ({"tools": [{"name": "f", "input_schema": {"maximum": 2**65}}]}, "number_range"),
    ],
)
def test_requests_left_to_the_engine(fields: dict[str, Any], reason: str) -> None:
    request = parse(**({"messages": [USER]} | fields))
    assert (request.prompt, request.no_prompt) == (None, reason)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"type": "image", "source": "u"}, "messages_shape"),
        ({"type": "image", "source": {"type": "url", "url": 5}}, "messages_shape"),
        ({"type": "document"}, "messages_shape"),
        ({"type": "tool_result", "content": [{"type": "image", "source": "u"}]}, "messages_shape"),
        ({"type": "tool_result", "content": [{"type": "text", "text": None}]}, "messages_shape"),
        ({"type": "tool_result", "content": 5}, "messages_shape"),
        ({"type": "tool_result", "content": ["x"]}, "messages_shape"),
        ({"type": "tool_addition", "tool": {}}, "messages_shape"),
        ({"type": "tool_use", "name": "f", "input": {}}, "messages_shape"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}, "messages_shape"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": {"n": 2**64}}, "number_range"),
        ({"type": "odd"}, "messages_shape"),
        ({"type": {}}, "messages_shape"),
        ({"text": "x"}, "messages_shape"),
        ("x", "messages_shape"),
    ],
)
def test_blocks_left_to_the_engine(block: object, reason: str) -> None:
    request = parse(messages=[{"role": "user", "content": [block]}])
    assert (request.prompt, request.no_prompt) == (None, reason)
