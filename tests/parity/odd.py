"""Odd requests: rarely sent, or legal only just; as `(path, name, fields)`. For a few families only.

They were found by reading what the engine's validation lets through and by asking it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.parity.chats import WEATHER, Fields, assistant, call, result, system, text, user

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
HEADER: Final = "x-anthropic-billing-header: 1"
GO_ON: Final[Fields] = {"add_generation_prompt": False, "continue_final_message": True}
CACHED: Final = {"cache_control": {"type": "ephemeral"}}


def shapes() -> Iterator[tuple[str, str, Fields]]:
    for name, fields in (*_tools(), *_contents(), *_switches()):
        yield CHAT, f"odd_{name}", fields
    for name, fields in _completions():
        yield COMPLETIONS, f"odd_{name}", fields
    for name, fields in _responses():
        yield RESPONSES, f"odd_{name}", fields
    for name, fields in _anthropic():
        yield MESSAGES, f"odd_{name}", {"max_tokens": 4, **fields}


def _tool(**more: object) -> list[Fields]:
    return [{"type": "function", "function": {"name": "f", **more}}]


def _tools() -> Iterator[tuple[str, Fields]]:
    ask = {"messages": [user("?")]}
    extras = {
        "x": 1,
        "type": "function",
        "function": {"z": 2, "name": "f", "arguments": "{}", "y": 3},
        "id": "call_00000001",
    }
    yield "call_extras", {"messages": [user("?"), assistant("", tool_calls=[extras]), result("1")]}
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
    yield "custom_call", {"messages": [user("?"), assistant("", tool_calls=[custom]), result("1", "c")]}
    yield "untyped_tool", {**ask, "tools": [{"function": {"name": "f"}}]}
    yield "strict_text", {**ask, "tools": _tool(strict="true")}
    yield "deferred", {**ask, "tools": [{**_tool(strict=False)[0], "defer_loading": True}]}
    own = _tool(defer_loading=False, description="")[0]
    yield "deferred_twice", {**ask, "tools": [{**own, "defer_loading": True}]}
    yield "nulls", {**ask, "tools": _tool(parameters=None, description=None)}
    yield (
        "numbers",
        {**ask, "tools": _tool(parameters={"a": 1e18, "b": 1.0, "c": [True, None], "d": "</s>&'\u2028"})},
    )
    yield "null_tools", {**ask, "tools": None}
    yield (
        "named_choice",
        {
            **ask,
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        },
    )
    yield "required_choice", {**ask, "tools": [WEATHER], "tool_choice": "required"}
    for name, arguments in (
        ("bool", "true"),
        ("blank", " "),
        ("twice", '{"a":1,"a":{"b":[]}}'),
        ("infinite", '{"a":Infinity,"b":-0.0,"c":1E400,"d":0.1e-7}'),
        ("surrogate", '{"a":"\\ud83d"}'),
    ):
        yield (
            f"arguments_{name}",
            {"messages": [user("?"), assistant("", tool_calls=[call("f", arguments)]), result("1")]},
        )


def _contents() -> Iterator[tuple[str, Fields]]:
    asked = [user("Weather?"), assistant(None, tool_calls=[call("f", '{"a":1}')])]
    cached = [{"type": "text", "text": "b", **CACHED}]
    extra = {"type": "text", "text": "a", "x": 1, **CACHED, "prompt_cache_breakpoint": {"mode": "explicit"}}
    yield "part_extras", {"messages": [user([extra])]}
    yield "cached_assistant", {"messages": [user("a"), assistant(cached), user("c")]}
    yield "cached_system", {"messages": [system(cached), user("c")]}
    yield "cached_result", {"messages": [*asked, result(cached)]}
    yield "mixed_result", {"messages": [*asked, result([{"type": "tool_reference", "name": "f"}, *cached])]}
    yield "result_without_id", {"messages": [*asked, {"role": "tool", "content": "x"}]}
    yield "result_null_name", {"messages": [*asked, {**result("x"), "name": None}]}
    yield (
        "null_reasoning",
        {"messages": [user("?"), assistant("x", reasoning=None, reasoning_content="q"), user("y")]},
    )
    yield "users_reasoning", {"messages": [user("?", reasoning="no")]}
    nulls = {"audio": None, "function_call": None, "refusal": None, "tool_calls": None}
    yield "null_fields", {"messages": [user("?"), assistant("x", **nulls), user("y")]}
    yield (
        "function_call",
        {"messages": [user("?"), assistant(None, function_call={"name": "f", "arguments": "{}"}), user("y")]},
    )
    rules = {"role": "developer", "content": "d"}
    yield "developer_tools", {"messages": [{**rules, "tools": [WEATHER]}, user("y")]}
    yield "developer_parts", {"messages": [{**rules, "content": text("d", "e")}, user("y")]}
    yield "developer_empty", {"messages": [{**rules, "content": ""}, user("y")]}
    yield "developer_last", {"messages": [user("y"), rules]}
    yield "developer_continue", {"messages": [user("y"), rules, assistant("so")], **GO_ON}
    yield "developer_among_systems", {"messages": [system(""), rules, system(text("y", "z")), user("z")]}
    yield "developer_header", {"messages": [{**rules, "content": f"{HEADER}\nrest"}, user("y")]}
    yield "header_only", {"messages": [system(HEADER), user("y")]}
    yield "header_line", {"messages": [system(f"{HEADER}\n"), user("y")]}
    yield "header_of_user", {"messages": [user(f"{HEADER}\nz")]}
    yield "task", {"messages": [user("y", task="t")]}
    yield "empty_name", {"messages": [user("y", name="")]}
    yield "capital_role", {"messages": [{"role": "User", "content": "x"}]}
    yield "control_characters", {"messages": [user("a\x00b\x7f\x85\u2028")]}
    thinking = {"type": "thinking", "thinking": "Hm", "closed": True}
    yield "closed_thinking", {"messages": [user("?"), assistant([thinking, *text("x")]), user("!")]}
    yield "empty_texts", {"messages": [user(text("", ""))]}


def _switches() -> Iterator[tuple[str, Fields]]:
    ask: Fields = {"messages": [user("?")]}
    for name, given in (
        ("tools", {"tools": [WEATHER]}),
        ("effort", {"reasoning_effort": "high"}),
        ("unset", {"enable_thinking": None, "thinking": None, "model_identity": "auto"}),
        ("continue", {"continue_final_message": True}),
        ("bad_documents", {"documents": ["a"]}),
    ):
        yield f"kwargs_{name}", {**ask, "chat_template_kwargs": given}
    yield "no_documents", {**ask, "documents": []}
    yield "null_effort", {**ask, "reasoning_effort": None}
    yield (
        "effort_and_kwargs",
        {**ask, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    )
    yield "flag_number", {**ask, "add_generation_prompt": 0}
    yield "flag_text", {**ask, "add_generation_prompt": "false"}
    yield "flag_null", {**ask, "add_special_tokens": None}
    yield "forwarded_tokens", {**ask, "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}}
    yield "transfer", {**ask, "kv_transfer_params": {"do_remote_prefill": False}}
    yield "truncated", {"messages": [user("one two three")], "truncate_prompt_tokens": 2}
    yield "sampling", {**ask, "n": 2, "logprobs": True, "stop": ["x"], "max_completion_tokens": 3, "seed": 1}
    yield "format", {**ask, "response_format": {"type": "json_object"}}
    yield "continue_reasoning", {"messages": [user("?"), assistant("a", reasoning="r")], **GO_ON}
    yield "continue_blank", {"messages": [user("?"), assistant("  ")], **GO_ON}
    mark = "CONTINUE_FINAL_MESSAGE_TAG "
    yield "continue_mark", {"messages": [user(f"{mark}x"), assistant(f"{mark}y")], **GO_ON}


def _completions() -> Iterator[tuple[str, Fields]]:
    for name, prompt in (
        ("number", 5),
        ("mixed", [5, "a"]),
        ("negative", [-1, 5]),
        ("out_of_vocabulary", [99_999_999]),
        ("bools", [True, False]),
        ("floats", [1.0, 2.0]),
        ("empty_list", []),
        ("one_of_a_list", ["only one"]),
        ("empty_ids", [[5], []]),
        ("special_ids", [0, 1, 2, 1, 5]),
        ("line_ends", "a\r\nb\rc\n\u2029d"),
        ("normal_forms", "e\u0301 \u1100\u1161\u11a8 \ufb01 \u212b \u0344"),
        ("glued_specials", "x<|im_start|>y <|im_start|> z<think>q</s>▁▁ ▁a<unk><0x0A>"),
        ("blanks", "a  b   c    d     e      f                 g"),
    ):
        yield name, {"prompt": prompt}
    yield "flag_text", {"prompt": "a", "add_special_tokens": "no"}
    yield "truncated_auto", {"prompt": "a b c d", "truncate_prompt_tokens": -1}
    yield "empty_suffix", {"prompt": "a", "suffix": ""}
    yield "forwarded_tokens", {"prompt": "a", "kv_transfer_params": {"prompt_token_ids": [7, 8]}}


def _responses() -> Iterator[tuple[str, Fields]]:
    done: Fields = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}

    def said(*texts: str, **more: str) -> Fields:
        return {
            **done,
            **more,
            "content": [{"type": "output_text", "text": t, "annotations": []} for t in texts],
        }

    def called(number: int, arguments: str) -> list[Fields]:
        identity = f"call_0000000{number}"
        return [
            {"type": "function_call", "call_id": identity, "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": identity, "output": "x"},
        ]

    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    for name, given in (
        ("empty", ""),
        ("no_items", []),
        ("easy_roles", [user("a"), assistant("b"), system("c"), user("d")]),
        ("empty_part", [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": ""}])]),
        ("calls", [*called(1, "{bad"), *called(2, "{}")]),
        ("unfinished", [user("a"), said("partial ", status="incomplete")]),
        ("summary", [summary, *called(1, "{}")]),
        ("two_texts", [user("a"), said("1", "2"), user("b")]),
    ):
        yield name, {"input": given}
    yield "header", {"input": [user(f"{HEADER}\nz")], "instructions": f"{HEADER}\nz"}
    yield "web_search", {"input": "x", "tools": [{"type": "web_search"}]}
    tool = {"type": "function", "name": "f", "parameters": {"a": 1}, "strict": True, "description": "d"}
    yield "choice_none", {"input": "x", "tool_choice": "none", "tools": [tool]}
    yield "truncation", {"input": "x", "truncation": "auto"}
    yield "effort_none", {"input": "x", "reasoning": {"effort": "none"}}


def _anthropic() -> Iterator[tuple[str, Fields]]:
    def used(*numbers: int) -> Fields:
        return assistant(
            [
                {
                    "type": "tool_use",
                    "id": f"toolu_00000{n}",
                    "name": "f",
                    "input": {"b": 1, "a": [1.0, None]},
                }
                for n in numbers
            ]
        )

    def gave(number: int, **more: object) -> Fields:
        return {"type": "tool_result", "tool_use_id": f"toolu_00000{number}", **more}

    yield "same_role_twice", {"messages": [user("a"), user("b"), assistant("c")]}
    yield "no_blocks", {"messages": [user([])]}
    yield "no_result", {"messages": [user("a"), used(1), user([gave(1)])]}
    yield (
        "two_results",
        {
            "messages": [
                user("a"),
                used(1, 2),
                user([gave(1, content="1", is_error=True), gave(2, content=[])]),
            ]
        },
    )
    yield "empty_system", {"messages": [user("a")], "system": ""}
    yield "header_text", {"messages": [user("a")], "system": f"{HEADER}\nz"}
    yield "no_thinking", {"messages": [user("a")], "thinking": {"type": "disabled"}}
    schema = {"name": "f", "input_schema": {"properties": {}}}
    yield "untyped_schema", {"messages": [user("a")], "tools": [schema], "tool_choice": {"type": "any"}}
    yield "system_inside", {"messages": [user("a"), system("s"), user("b")]}
    hidden = {"type": "redacted_thinking", "data": "x"}
    yield "hidden_thinking", {"messages": [user("a"), assistant([hidden, *text("b")]), user("c")]}
    yield "cached_blocks", {"messages": [user([{**text("a")[0], **CACHED}, *text("b")])]}
    yield "no_tools", {"messages": [user("a")], "tools": []}
    yield "effort", {"messages": [user("a")], "output_config": {"effort": "high"}}
