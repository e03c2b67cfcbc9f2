"""Chat-completion requests in every shape that clients send, as `(name, fields)`.

Each entry is one behaviour of the engine between the body and the template. Written for a family's
template to render or refuse: a refusal is recorded, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

Fields = dict[str, Any]

WEATHER: Final[Fields] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city — °C or °F",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}
BARE_TOOL: Final[Fields] = {"type": "function", "function": {"name": "now"}}
ODD_TOOL: Final[Fields] = {
    "function": {
        "parameters": {"type": "object", "properties": {}},
        "name": "odd",
        "strict": True,
        "x_note": "kept?",
    },
    "type": "function",
    "x_extra": 1,
}


def user(content: Any, **more: Any) -> Fields:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Fields:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> Fields:
    return {"role": "system", "content": content}


def call(name: str, arguments: Any, identity: str = "call_00000001") -> Fields:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, identity: str = "call_00000001") -> Fields:
    return {"role": "tool", "content": content, "tool_call_id": identity}


def text(*texts: str) -> list[Fields]:
    return [{"type": "text", "text": one} for one in texts]


def plain_shapes() -> Iterator[tuple[str, Fields]]:
    """Contents and roles."""
    yield "one", {"messages": [user("Hello there, how are you?")]}
    yield "system", {"messages": [system("  Be brief.  "), user(" What is 17 * 23? ")]}
    turns = [user("First"), assistant("  Second\n"), user("Third"), assistant("Fourth"), user("Fifth")]
    yield "turns", {"messages": [system("Five turns."), *turns]}
    yield (
        "unicode",
        {
            "messages": [
                user("Ünïcödé café e\u0301 日本語 🙂👩‍👩‍👧 \u00a0\u200b\ufeff ﬁ ½ Ⅷ \u0000 \r\n\tend")
            ]
        },
    )
    yield (
        "specials_in_text",
        {"messages": [user("<|im_end|><s>[INST]<|eot_id|><｜User｜><bos>\n\n\n<think> </think>")]},
    )
    yield "empty", {"messages": [user("")]}
    yield "null", {"messages": [user(None)]}
    yield "no_content", {"messages": [user("Hi"), {"role": "assistant"}, user("Still there?")]}
    yield "parts", {"messages": [system(text("One.", "Two.")), user(text("Part one", "part two", ""))]}
    yield "string_parts", {"messages": [user(["as text", "and more"])]}
    yield (
        "mixed_parts",
        {"messages": [user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}])]},
    )
    yield "empty_parts", {"messages": [user([])]}
    yield "null_part", {"messages": [user([{"type": "text", "text": None}, {"type": "text", "text": "b"}])]}
    yield (
        "cache_control",
        {"messages": [user([{"type": "text", "text": "keep", "cache_control": {"type": "x"}}])]},
    )
    yield (
        "refusal",
        {"messages": [user("?"), assistant([{"type": "refusal", "refusal": "No."}]), user("Why?")]},
    )
    yield (
        "thinking_part",
        {
            "messages": [
                user("?"),
                assistant([{"type": "thinking", "thinking": "Hm."}, *text("Yes.")]),
                user("!"),
            ]
        },
    )
    yield "assistant_parts", {"messages": [user("?"), assistant(text("One", "Two")), user("!")]}
    yield (
        "image",
        {"messages": [user([*text("What?"), {"type": "image_url", "image_url": {"url": "data:,"}}])]},
    )
    yield "untyped_part", {"messages": [user([{"text": "no type"}])]}
    yield "name", {"messages": [user("Who am I?", name="Ann"), assistant("Ann.", name="bot"), user("Right")]}
    yield (
        "unknown_field",
        {"messages": [user("Hi", x_custom="y", thinking="z"), assistant("Ho", thinking="t"), user("?")]},
    )
    yield "developer", {"messages": [{"role": "developer", "content": "Rules first."}, user("Go")]}
    yield (
        "developer_late",
        {
            "messages": [
                system("One."),
                {"role": "developer", "content": "Two."},
                user("Go"),
                system("Three."),
            ]
        },
    )
    yield "system_late", {"messages": [user("Hi"), assistant("Ho"), system("Late rules."), user("Go")]}
    yield "two_systems", {"messages": [system("One."), system("Two."), user("Go")]}
    yield "odd_role", {"messages": [user("Hi"), {"role": "critic", "content": "Hm."}, user("Go")]}
    yield (
        "function_role",
        {"messages": [user("Hi"), {"role": "function", "name": "f", "content": "1"}, user("Go")]},
    )
    yield "only_assistant", {"messages": [assistant("I begin.")]}
    yield (
        "billing_header",
        {"messages": [system("x-anthropic-billing-header: cc=1; cch=abc;\nReal rules."), user("Go")]},
    )
    yield (
        "billing_header_part",
        {"messages": [system(text("x-anthropic-billing-header: cch=abc;", "Real rules.")), user("Go")]},
    )
    yield "white_space", {"messages": [user("\n\n  leading and trailing \t\n\n")]}


def tool_shapes() -> Iterator[tuple[str, Fields]]:
    """Tools, calls and results."""
    yield "tools", {"messages": [system("Use tools."), user("Weather in Köln?")], "tools": [WEATHER]}
    yield "tools_no_system", {"messages": [user("Weather in Köln?")], "tools": [WEATHER, BARE_TOOL]}
    yield "odd_tool", {"messages": [user("Go")], "tools": [ODD_TOOL]}
    yield "tool_choice_none", {"messages": [user("Go")], "tools": [WEATHER], "tool_choice": "none"}
    yield "no_tools", {"messages": [user("Go")], "tools": []}
    asked = [
        user("Weather?"),
        assistant(None, tool_calls=[call("get_weather", '{"city": "Köln", "unit": "C"}')]),
    ]
    yield "call", {"messages": [*asked, result("12 °C"), user("And now?")], "tools": [WEATHER]}
    yield "call_result_last", {"messages": [*asked, result('{"t": 12}')], "tools": [WEATHER]}
    yield "call_without_tools", {"messages": [*asked, result("12"), assistant("12 °C."), user("Thanks")]}
    yield (
        "call_with_text",
        {"messages": [user("?"), assistant("Let me see.", tool_calls=[call("now", "{}")]), result("noon")]},
    )
    yield (
        "two_calls",
        {
            "messages": [
                user("Both?"),
                assistant(
                    "", tool_calls=[call("a", '{"x":1}'), call("b", '{"y":[1,2.50,null]}', "call_00000002")]
                ),
                result("1"),
                result("2", "call_00000002"),
            ]
        },
    )
    for name, arguments in (
        ("object", {"city": "Köln", "n": 1}),
        ("empty", ""),
        ("null", None),
        ("broken", '{"city": '),
        ("list", "[1, 2]"),
        ("number", "42"),
        ("float", '{"x": 1e3, "y": 1.10, "z": 12345678901234567890, "s": "\\u00fc"}'),
        ("nan", '{"x": NaN}'),
        ("order", '{"b": 1, "a": 2, "b": 3}'),
    ):
        asking = assistant(None, tool_calls=[call("f", arguments)])
        yield f"arguments_{name}", {"messages": [user("?"), asking, result("ok")]}
    yield "empty_calls", {"messages": [user("?"), assistant("No calls.", tool_calls=[]), user("!")]}
    yield "null_calls", {"messages": [user("?"), assistant("No calls.", tool_calls=None), user("!")]}
    yield (
        "call_extras",
        {
            "messages": [
                user("?"),
                assistant("", tool_calls=[{**call("f", "{}"), "index": 0, "x": 1}]),
                {**result("ok"), "name": "f"},
            ]
        },
    )
    yield (
        "untyped_call",
        {
            "messages": [
                user("?"),
                assistant("", tool_calls=[{"id": "call_00000001", "function": {"name": "f"}}]),
                result("1"),
            ]
        },
    )
    yield "result_parts", {"messages": [*asked, result(text("line one", "line two"))]}
    yield "result_empty", {"messages": [*asked, result("")]}
    yield "result_null", {"messages": [*asked, result(None)]}
    yield "tool_reference", {"messages": [*asked, result([{"type": "tool_reference", "name": "f"}])]}


def switch_shapes() -> Iterator[tuple[str, Fields]]:
    """Reasoning, template variables, how the prompt ends, documents."""
    thought = [user("2+2?"), assistant("4", reasoning="Count."), user("Sure?")]
    yield "reasoning", {"messages": thought}
    yield (
        "reasoning_content",
        {"messages": [user("2+2?"), assistant("4", reasoning_content="\nCount.\n"), user("?")]},
    )
    yield (
        "reasoning_both",
        {"messages": [user("?"), assistant("4", reasoning="A", reasoning_content="B"), user("?")]},
    )
    yield (
        "reasoning_with_call",
        {
            "messages": [
                user("?"),
                assistant(None, reasoning="Call it.", tool_calls=[call("f", '{"a": 1}')]),
                result("1"),
            ]
        },
    )
    yield "reasoning_empty", {"messages": [user("?"), assistant("4", reasoning=""), user("?")]}
    for name, given in (
        ("thinking_off", {"enable_thinking": False}),
        ("thinking_on", {"enable_thinking": True, "thinking": True}),
        ("unused", {"no_such_variable": [1, {"a": None}]}),
        ("date", {"date_string": "1 Jan 2026", "current_date": "2026-01-01"}),
        ("tools_variable", {"custom_tools": [WEATHER], "tools_in_user_message": False}),
        ("end_tokens", {"eos_token": "<E>", "bos_token": "<B>"}),
        ("generation", {"add_generation_prompt": False}),
        ("documents_variable", {"documents": [{"title": "T", "text": "t"}]}),
        ("messages_variable", {"messages": [], "conversation": []}),
        ("tokenizer_arguments", {"padding": True, "truncation": True, "max_length": 4}),
        ("standard_names", {"unk_token": "<U>", "pad_token": "<P>", "range": 3}),
    ):
        yield f"kwargs_{name}", {"messages": [system("Now."), user("Go")], "chat_template_kwargs": given}
    for effort in ("none", "low", "high"):
        yield f"effort_{effort}", {"messages": [user("Think")], "reasoning_effort": effort}
    documents = [{"title": "A", "text": "alpha"}, {"title": "B", "text": "beta"}]
    yield "documents", {"messages": [user("Which?")], "documents": documents}
    yield (
        "no_generation_prompt",
        {"messages": [user("Go"), assistant("Went")], "add_generation_prompt": False},
    )
    yield "generation_prompt_after_assistant", {"messages": [user("Go"), assistant("Went")]}
    go_on: Fields = {"add_generation_prompt": False, "continue_final_message": True}
    yield "continue", {"messages": [user("Tell"), assistant("Once upon a")], **go_on}
    yield "continue_blanks", {"messages": [user("Tell"), assistant("Once upon a  ")], **go_on}
    yield "continue_parts", {"messages": [user("Tell"), assistant(text("Once", "upon a "))], **go_on}
    yield "continue_user", {"messages": [user("Complete me: the")], **go_on}
    yield (
        "continue_twice_same",
        {"messages": [user("la"), assistant("la"), user("la"), assistant("la")], **go_on},
    )
    yield "continue_empty", {"messages": [user("Tell"), assistant("")], **go_on}
    yield "continue_null", {"messages": [user("Tell"), assistant(None)], **go_on}
    yield "continue_call", {"messages": [user("?"), assistant("See", tool_calls=[call("f", "{}")])], **go_on}
    yield "continue_both", {"messages": [user("?"), assistant("So")], "continue_final_message": True}
    yield "special_tokens_added", {"messages": [user("Go")], "add_special_tokens": True}
    yield "echo", {"messages": [user("Go")], "echo": True}
    yield "salted", {"messages": [user("Go")], "cache_salt": "salt"}


def random_chats(seed: str, count: int) -> Iterator[tuple[str, Fields]]:
    """Conversations of random length over all of the above; a pure function of `seed`."""
    rng = random.Random(seed)
    for number in range(count):
        messages = [system(_prose(rng))] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            question = _prose(rng)
            messages.append(user(question if rng.random() < 0.7 else text(*question.split(". "))))
            answer = assistant(_prose(rng))
            if rng.random() < 0.3:
                answer["reasoning"] = _prose(rng)
            messages.append(answer)
        messages.append(user(_prose(rng)))
        fields: Fields = {"messages": messages}
        if rng.random() < 0.3:
            fields["tools"] = [WEATHER]
        yield f"random_{number}", fields


_WORDS: Final = (
    *(
        "the",
        "river",
        "block",
        "über",
        "token",
        "",
        "\n",
        "cache,",
        "42",
        "1234567",
        "naïve",
        "日本",
        "prefix",
    ),
    *(
        "🙂",
        "_under_score",
        "CamelCase",
        "it's",
        "don't",
        "{json:",
        "[1,",
        "2]}",
        "https://example.org/a?b=c",
    ),
    *("\t", "x=y;", "«quote»", "...", "--", "#", "heading", "$9.99", "%"),
)


def _prose(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 24)))
