"""Requests of the other shapes: completions, responses, Anthropic messages; as `(path, name, fields)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tests.parity.chats import WEATHER, Fields

COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"


def shapes() -> Iterator[tuple[str, str, Fields]]:
    for name, fields in completions():
        yield COMPLETIONS, name, fields
    for name, fields in responses():
        yield RESPONSES, name, fields
    for name, fields in anthropic():
        yield MESSAGES, name, fields


def completions() -> Iterator[tuple[str, Fields]]:
    yield "text", {"prompt": "The quick brown fox jumps over the lazy dog."}
    yield "text_plain", {"prompt": "No begin token, please", "add_special_tokens": False}
    yield "text_list", {"prompt": ["first of two", "second of two"]}
    yield "ids", {"prompt": [5, 6, 7, 8, 9, 10]}
    yield "id_lists", {"prompt": [[5, 6, 7], [8, 9, 10, 11]]}
    yield "unicode", {"prompt": "naïve e\u0301 日本語 🙂 \u200d \u0000 12345 \r\n\n  x\u3000y ﬃ"}
    yield "specials", {"prompt": "<s>a</s> <|im_start|>b<|eot_id|>[INST] c <｜User｜> <unk> <0x41> <bos>"}
    yield "white_space", {"prompt": "  leading\n\n\n\ttabs   and    blanks  "}
    yield "one_blank", {"prompt": " "}
    yield "empty", {"prompt": ""}
    yield "suffix", {"prompt": "def f(", "suffix": "):"}
    yield "echo", {"prompt": "say it again", "echo": True, "max_tokens": 1}
    yield "truncated", {"prompt": "one two three four five six", "truncate_prompt_tokens": 3}
    yield "long", {"prompt": "block by block the prefix grows. " * 12}


def _item(role: str, content: Any, **more: Any) -> Fields:
    return {"type": "message", "role": role, "content": content, **more}


def responses() -> Iterator[tuple[str, Fields]]:
    tool = {"type": "function", **WEATHER["function"]}
    yield "text", {"input": "Hello there, how are you?"}
    yield "instructions", {"input": "What is 17 * 23?", "instructions": "Be brief."}
    yield "items", {"input": [_item("user", "First"), _item("assistant", "Second"), _item("user", "Third")]}
    yield (
        "parts",
        {
            "input": [
                _item("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])
            ]
        },
    )
    yield "developer", {"input": [_item("developer", "Rules."), _item("user", "Go")], "instructions": "More."}
    yield "tools", {"input": "Weather?", "tools": [tool]}
    yield (
        "output_item",
        {
            "input": [
                _item("user", "Hi"),
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
                },
                _item("user", "Go on"),
            ]
        },
    )
    yield (
        "call",
        {
            "input": [
                _item("user", "Weather?"),
                {
                    "type": "function_call",
                    "call_id": "call_00000001",
                    "name": "get_weather",
                    "arguments": '{"city":"Köln"}',
                },
                {"type": "function_call_output", "call_id": "call_00000001", "output": "12 °C"},
            ],
            "tools": [tool],
        },
    )
    yield (
        "reasoning_item",
        {
            "input": [
                _item("user", "2+2?"),
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Count."}],
                },
                _item("assistant", "4"),
                _item("user", "Sure?"),
            ]
        },
    )
    yield "effort", {"input": "Think", "reasoning": {"effort": "low"}}
    yield "template_kwargs", {"input": "Think", "chat_template_kwargs": {"enable_thinking": False}}
    yield "image", {"input": [_item("user", [{"type": "input_image", "image_url": "data:,"}])]}
    yield "previous", {"input": "Go on", "previous_response_id": "resp_1"}
    yield "salted", {"input": "Go", "cache_salt": "salt"}


def anthropic() -> Iterator[tuple[str, Fields]]:
    tool = {
        "name": "get_weather",
        "description": "Weather",
        "input_schema": WEATHER["function"]["parameters"],
    }
    for name, fields in (
        ("text", {"messages": [{"role": "user", "content": "Hello there"}]}),
        ("system", {"system": "Be brief.", "messages": [{"role": "user", "content": "17 * 23?"}]}),
        (
            "system_parts",
            {
                "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
                "messages": [{"role": "user", "content": "Go"}],
            },
        ),
        (
            "billing_header",
            {
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: cch=abc;"},
                    {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}},
                ],
                "messages": [{"role": "user", "content": "Go"}],
            },
        ),
        (
            "parts",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]},
        ),
        (
            "turns",
            {
                "messages": [
                    {"role": "user", "content": "First"},
                    {"role": "assistant", "content": [{"type": "text", "text": "Second"}]},
                    {"role": "user", "content": "Third"},
                ]
            },
        ),
        (
            "thinking",
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Count.", "signature": "s"},
                            {"type": "text", "text": "4"},
                        ],
                    },
                    {"role": "user", "content": "Sure?"},
                ]
            },
        ),
        (
            "tool_use",
            {
                "tools": [tool],
                "messages": [
                    {"role": "user", "content": "Weather?"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "Let me see."},
                            {
                                "type": "tool_use",
                                "id": "toolu_00000001",
                                "name": "get_weather",
                                "input": {"city": "Köln"},
                            },
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "toolu_00000001", "content": "12 °C"},
                            {"type": "text", "text": "And now?"},
                        ],
                    },
                ],
            },
        ),
        (
            "tool_result_parts",
            {
                "messages": [
                    {"role": "user", "content": "Weather?"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "toolu_00000001", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "toolu_00000001",
                                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                            }
                        ],
                    },
                ]
            },
        ),
        (
            "prefill",
            {"messages": [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "Once"}]},
        ),
        ("tools_only", {"tools": [tool], "messages": [{"role": "user", "content": "Go"}]}),
        (
            "image",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": "iVBORw0KGgo=",
                                },
                            }
                        ],
                    }
                ]
            },
        ),
    ):
        yield name, {"max_tokens": 8, **fields}
