"""What requests at random (tests/parity/at_random) found beyond the corpus; as `(path, name, fields)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.chats import Fields, assistant, call, result, system, text, user
from tests.parity.odd import CHAT, HEADER, MESSAGES, RESPONSES


def shapes() -> Iterator[tuple[str, str, Fields]]:
    for name, messages in _chats():
        yield CHAT, f"found_{name}", {"messages": messages}
    for name, given in _responses():
        yield RESPONSES, f"found_{name}", {"input": given}
    for name, fields in _anthropic():
        yield MESSAGES, f"found_{name}", {"max_tokens": 4, **fields}


def _chats() -> Iterator[tuple[str, list[Any]]]:
    yield "bare_texts", [user("?"), assistant(["one", "", "two"], reasoning="r"), user("!")]
    yield "bare_header", [{**system([HEADER, "Rules."]), "task": "t"}, user("Go")]
    yield (
        "bare_result",
        [user("?"), assistant(None, tool_calls=[call("f", "{}")]), {**result(["a", "", "b"]), "name": "n"}],
    )


def _responses() -> Iterator[tuple[str, list[Any]]]:
    def inputs(*texts: str) -> list[Fields]:
        return [{"type": "input_text", "text": one} for one in texts]

    output = {"type": "function_call_output", "call_id": "call_00000001", "output": inputs("a", "")}
    made = {"type": "function_call", "call_id": "call_00000001", "name": "f", "arguments": "{}"}
    yield "empty_line_of_a_result", [user("?"), made, output]
    yield "header_in_a_part", [system(inputs(f"{HEADER}\nRules.")), user("Go")]
    yield "typed_input_text", [user("?"), {"type": "message", **assistant(inputs("a", "b"))}, user("!")]
    yield "empty_answer", [user("?"), assistant([]), user("!")]
    custom = {"type": "custom_tool_call", "call_id": "call_00000001", "name": "c", "input": "x"}
    for name, item in (("call", made), ("custom_call", custom)):
        nulls = {"id": "fc_1", "namespace": None, "caller": None, "async_": None}
        yield f"{name}_as_answered", [user("?"), {**item, **nulls}, user("!")]
    for name, more in (("status", {"status": None}), ("id", {"id": None})):
        yield (
            f"empty_answer_null_{name}",
            [user("?"), {"type": "message", **assistant([]), **more}, user("!")],
        )


def _anthropic() -> Iterator[tuple[str, Fields]]:
    ask = user("Go")
    yield "two_headers", {"system": f"{HEADER}\n{HEADER}\nRules.", "messages": [ask]}
    inside = [ask, system("One."), assistant("Yes."), system(text(HEADER, "Two.", "Three.")), ask]
    yield "system_inside", {"system": "Top.", "messages": inside}
    yield "only_systems_inside", {"messages": [ask, system(HEADER), system(""), system("One."), ask]}
    schema = {"input_schema": {"type": "object"}}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {"name": "new", **schema}},
        },
    ]
    tools = [{"name": "f", **schema}, {"name": "late", "defer_loading": True, **schema}]
    yield "tool_changes", {"tools": tools, "messages": [ask, system(changes), ask]}
    used = assistant([{"type": "tool_use", "id": "toolu_000001", "name": "f", "input": {}}])
    found = [
        {"type": "tool_reference", "tool_name": "f"},
        *text("Found:"),
        {"type": "search_result", "x": 1},
    ]
    gave = {"type": "tool_result", "tool_use_id": "toolu_000001"}
    named = {"type": "tool_reference", "tool_name": "f"}
    yield "named_tools", {"messages": [ask, used, user([{**gave, "content": found}, named])]}
    parts = [*text("it's"), {"n": [1.0, None, True]}]
    yield "result_of_an_assistant", {"messages": [ask, assistant([{**gave, "content": parts}]), ask]}
