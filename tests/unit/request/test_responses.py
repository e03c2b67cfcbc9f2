"""/v1/responses: items to the messages that the engine renders (vLLM 0.32), or a reason for none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.request.chat import engine_messages
from epp.request.parse import ChatPrompt, ParsedRequest, RequestKind, parse_request

Items = list[dict[str, Any]]


def parse(**fields: Any) -> ParsedRequest:
    body = json.dumps({"model": "m"} | fields).encode()
    return parse_request(body, "/v1/responses", {"content-type": "application/json"})


def chat(**fields: Any) -> ChatPrompt:
    request = parse(**fields)
    assert request.no_prompt is None
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


def messages(items: Items) -> Items:
    return chat(input=items).messages


def call(name: str = "f", call_id: str = "c1", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def rendered_call(name: str = "f", call_id: str = "c1", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]} | more


def test_s_b05_input_as_text_with_instructions() -> None:
    request = parse(input="Hello", instructions="Be brief.", stream=True, cache_salt="s")
    assert request.kind is RequestKind.RESPONSES
    assert (request.stream, request.cache_salt) == (True, "s")
    assert request.prompt == ChatPrompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        add_special_tokens=True,
    )


def test_s_b05_input_as_items() -> None:
    items: Items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        said("Hello", id="msg_1", status="completed"),
        {"role": "user", "content": "And now?"},
    ]
    assert messages(items) == [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    items: Items = [
        {"role": "user", "content": "Q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        said("Let me see."),
        call("f", "c1"),
        call("g", "c2", ""),
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    assert messages(items) == [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "Let me see.",
            "tool_calls": [rendered_call("f", "c1"), rendered_call("g", "c2", "")],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {
            "role": "tool",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            "tool_call_id": "c2",
        },
    ]


def test_a_billing_line_is_taken_out_of_a_plain_text_only() -> None:
    """As the engine has it, which looks at parts of another type."""
    line = "x-anthropic-billing-header: 1\nRules."
    part = {"type": "input_text", "text": line}
    given = messages([{"role": "system", "content": line}, {"role": "system", "content": [part]}])
    shown = [message["content"] for message in engine_messages(given, "string")]
    assert shown == ["Rules.", line]


def test_two_texts_in_a_row_are_two_messages() -> None:
    assert messages([said("a"), said("b")]) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_two_reasonings_in_a_row_are_two_messages() -> None:
    item: dict[str, Any] = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages([item, item]) == [{"role": "assistant", "reasoning": "s"}] * 2


def test_instructions_are_no_turn_to_join() -> None:
    assert chat(input=[call()], instructions="I").messages == [
        {"role": "system", "content": "I"},
        {"role": "assistant", "tool_calls": [rendered_call()]},
    ]


def test_only_the_first_part_of_an_answer_is_rendered() -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert messages([{"type": "message", "role": "assistant", "content": parts}]) == [
        {"role": "assistant", "content": "a"}
    ]
    easy = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    for item in ({"role": "assistant"}, {"role": "assistant", "type": "message"}):
        assert messages([item | {"content": easy}]) == [{"role": "assistant", "content": "a"}]
    assert messages([{"role": "assistant", "content": []}]) == [{"role": "assistant", "content": []}]


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_answer_is_gone_on_with(status: str) -> None:
    prompt = chat(input=[{"role": "user", "content": "Q"}, said("The answer", status=status)])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert prompt.messages[-1] == {"role": "assistant", "content": "The answer"}


def test_tools_are_rendered_in_the_form_of_the_chat_api() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    tools = [
        {"parameters": schema, "strict": True, "name": "f", "type": "function", "description": "d", "x": 1},
        {"type": "function", "name": "g", "parameters": None},
    ]
    prompt = chat(input="Q", tools=tools, tool_choice="auto")
    assert prompt.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
        },
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None}},
    ]
    function = prompt.tools[0]["function"]
    assert list(function) == ["name", "description", "parameters", "strict"]
    assert list(function["parameters"]["properties"]) == ["b", "a"]
    assert chat(input="Q", tools=[]).tools is None


def test_custom_tools_are_functions_of_one_text_and_the_engines_own_are_not_shown() -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"type": "text"}}]
    function = {
        "name": "patch",
        "description": None,
        "parameters": {
            "type": "object",
            "properties": {
                "input": {"type": "string", "description": "The freeform text payload for this tool."}
            },
            "required": ["input"],
            "additionalProperties": False,
        },
    }
    assert chat(input="Q", tools=tools).tools == [{"type": "function", "function": function}]
    assert chat(input="Q", tools=tools[:1]).tools == []


def test_calls_of_custom_tools() -> None:
    items: Items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'zażółć "x"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    assert messages(items) == [
        {
            "role": "assistant",
            "tool_calls": [rendered_call("patch", "c1", '{"input": "zażółć \\"x\\""}')],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]


def test_effort_reaches_the_template() -> None:
    assert chat(input="Q", reasoning={"effort": "none"}).template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    assert chat(input="Q", reasoning={"effort": None}, chat_template_kwargs={"x": 1}).template_kwargs == {
        "x": 1
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "server_state"),
        ({"conversation": "conv_1"}, "server_state"),
        ({"prompt": {"id": "pmpt_1"}}, "server_state"),
        ({"previous_input_messages": []}, "server_state"),
        ({"truncation": "auto"}, "truncated_prompt"),
        ({"truncation": None}, "truncated_prompt"),
        ({"instructions": 5}, "input_shape"),
        ({"input": None}, "input_shape"),
        ({"input": {}}, "input_shape"),
        ({"input": []}, "input_shape"),
        ({"input": ["text"]}, "input_item"),
        ({"reasoning": "high"}, "reasoning_shape"),
        ({"reasoning": {"effort": "huge"}}, "reasoning_shape"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools_shape"),
        ({"tools": [{"name": "f"}]}, "tools_shape"),
        ({"tools": [{"type": "function"}]}, "tools_shape"),
        ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools_shape"),
        ({"cache_salt": 5}, "cache_salt_shape"),
        ({"chat_template_kwargs": {"tools": []}}, "template_kwargs"),
    ],
)
def test_requests_left_to_the_engine(fields: dict[str, Any], reason: str) -> None:
    request = parse(**({"input": "Q"} | fields))
    assert (request.prompt, request.no_prompt) == (None, reason)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input_item"),
        ({"type": "web_search_call", "id": "w"}, "input_item"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input_item"),
        ({"type": ["message"]}, "input_item"),
        ({"content": "no role"}, "input_item"),
        ({"role": "tool", "content": "x"}, "input_item"),
        ({"role": "user", "content": None}, "input_item"),
        ({"role": "user", "content": "x", "name": "n"}, "input_item"),
        ({"role": "user", "content": "x", "status": "odd"}, "input_item"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "multimodal"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "u", "x": 1}]}, "multimodal"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "multimodal"),
        ({"type": "message", "role": "assistant", "content": [{"type": "input_image"}]}, "multimodal"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}, "input_item"),
        ({"type": "message", "role": "assistant", "content": []}, "input_item"),
        ({"type": "message", "role": "assistant", "content": [{"type": "refusal"}]}, "input_item"),
        (call() | {"namespace": "n"}, "input_item"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input_item"),
        ({"type": "function_call_output", "output": "x"}, "input_item"),
        ({"type": "reasoning", "content": []}, "input_item"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input_item"),
        ({"role": "user", "content": "x", "status": "in_progress"}, "partial_item"),
        ({"role": "assistant", "content": "x", "status": "incomplete"}, "partial_item"),
        ({"type": "reasoning", "summary": [], "status": "in_progress"}, "partial_item"),
    ],
)
def test_items_left_to_the_engine(item: dict[str, Any], reason: str) -> None:
    request = parse(input=[{"role": "user", "content": "Q"}, item])
    assert (request.prompt, request.no_prompt) == (None, reason)
