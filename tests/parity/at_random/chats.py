"""Chats at random, and the tools of chats."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.parity.at_random.values import EFFORTS, Values
from tests.parity.chats import Fields

_PARTS: Final = (
    *["text"] * 8,
    *("input_text", "output_text", "refusal", "thinking", "tool_reference", "bare"),
)
_TEXT_KEYS: Final = {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}
_ODD_ROLES: Final = (
    *("system", "developer", "developer", "tool", "function", "critic", "user", "assistant", ""),
)
_ODD_ARGUMENTS: Final = (
    *("", "null", "[]", "[1, 2]", "42", "true", '"text"', "{", "{}", " ", None),
    *('{"a": NaN}', '{"a": 1, "a": 2}'),
    '{"x": 123456789012345678901234567890, "y": 1.10, "z": 1E400}',
)


class Chats:
    """`images`: parts for it, of which some are put among the others."""

    def __init__(self, values: Values, images: tuple[Fields, ...] = ()) -> None:
        self._values = values
        self._images = images

    def request(self) -> Fields:
        v = self._values
        fields: Fields = {"messages": self._conversation()}
        v.maybe(fields, 0.3, "tools", lambda: v.some(self._tool, 2, 0 if v.chance(0.1) else 1))
        v.maybe(fields, 0.1, "tool_choice", lambda: v.pick("none", "auto", "required", None))
        if v.chance(0.2):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        elif v.chance(0.1):
            v.maybe(fields, 0.5, "continue_final_message", lambda: v.pick(True, False))
            v.maybe(fields, 0.5, "add_generation_prompt", lambda: v.pick(True, False))
        v.maybe(fields, 0.1, "add_special_tokens", lambda: v.pick(True, False))
        v.maybe(fields, 0.2, "chat_template_kwargs", v.variables)
        v.maybe(fields, 0.15, "reasoning_effort", lambda: v.pick(*EFFORTS, None))
        v.maybe(fields, 0.1, "documents", lambda: v.some(self._document, 2))
        v.maybe(fields, 0.05, "echo", lambda: True)
        v.maybe(fields, 0.05, "response_format", lambda: {"type": v.pick("text", "json_object")})
        v.maybe(fields, 0.05, "stop", lambda: v.pick("x", ["x", "y"], []))
        v.maybe(fields, 0.05, "max_tokens", lambda: v.pick(1, 16))
        v.maybe(fields, 0.03, "thinking", lambda: {"type": "enabled"})
        v.maybe(fields, 0.03, "include_reasoning", lambda: v.pick(True, False))
        v.maybe(fields, 0.03, "parallel_tool_calls", v.flag)
        return fields

    def _document(self) -> Fields:
        return {"title": self._values.text(), "text": self._values.text()}

    def _conversation(self) -> list[Any]:
        v = self._values
        messages: list[Any] = []
        if v.chance(0.4):
            messages.append({"role": "system", "content": self._content()})
        for _ in range(v.up_to(3)):
            messages += [{"role": "user", "content": self._content()}, self._assistant()]
            calls = messages[-1].get("tool_calls") if v.chance(0.8) else None
            messages += [self._result(call) for call in calls or ()]
        if v.chance(0.8):
            messages.append({"role": "user", "content": self._content()})
        if v.chance(0.2):
            messages.insert(v.up_to(len(messages)), self._odd_message())
        for message in messages:
            v.maybe(message, 0.03, "name", lambda: v.pick("Ann", "", None))
            v.maybe(message, 0.02, "x_extra", v.json)
            v.maybe(message, 0.02, "task", lambda: v.pick("t", None, ""))
            v.maybe(message, 0.01, "tool_call_id", lambda: "call_00000009")
            v.maybe(message, 0.01, "reasoning", v.text)
        return messages

    def _odd_message(self) -> Fields:
        v = self._values
        message: Fields = {"role": v.pick(*_ODD_ROLES)}
        v.maybe(message, 0.9, "content", self._content)
        if message["role"] == "developer":
            v.maybe(message, 0.3, "tools", lambda: v.some(self._tool, 2))
        return message

    def _assistant(self) -> Fields:
        v = self._values
        message: Fields = {"role": "assistant"}
        v.maybe(message, 0.9, "content", self._content)
        v.maybe(message, 0.3, "tool_calls", self._calls)
        v.maybe(message, 0.25, "reasoning", v.text_or_less)
        v.maybe(message, 0.2, "reasoning_content", v.text_or_less)
        v.maybe(message, 0.03, "refusal", v.text_or_less)
        v.maybe(message, 0.02, "audio", lambda: None)
        v.maybe(message, 0.02, "function_call", lambda: None)
        v.maybe(message, 0.02, "prefix", lambda: True)
        return message

    def _result(self, call: Fields) -> Fields:
        message: Fields = {"role": "tool", "content": self._content()}
        if self._values.chance(0.9):
            message["tool_call_id"] = call.get("id", "call_00000003")
        return message

    def _content(self) -> Any:
        v = self._values
        if v.chance(0.3 if self._images else 0.7):
            return v.text()
        if v.chance(0.15):
            return v.pick(None, "", [], [""], [{}], 5)
        return v.some(self._part, 3, 1)

    def _part(self) -> Any:
        v = self._values
        if self._images and v.chance(0.3):
            return v.pick(*self._images)
        kind = v.pick(*_PARTS)
        if kind == "bare":
            return v.text()
        part: Fields = {"type": kind, _TEXT_KEYS.get(kind, "text"): None if v.chance(0.04) else v.text()}
        v.maybe(part, 0.05, "cache_control", lambda: {"type": "ephemeral"})
        v.maybe(part, 0.03, "x", v.json)
        v.maybe(part, 0.03, "name", lambda: "n")
        v.maybe(part, 0.02, "text", v.text_or_less)
        v.maybe(part, 0.02, "annotations", list)
        v.maybe(part, 0.02, "closed", lambda: True)
        if v.chance(0.01):
            del part["type"]
        return part

    def _calls(self) -> Any:
        v = self._values
        if v.chance(0.08):
            return v.pick(None, [])
        return [self._call(number) for number in range(v.up_to(2, 1))]

    def _call(self, number: int) -> Fields:
        v = self._values
        arguments = v.pick(*_ODD_ARGUMENTS, v.object())
        if v.chance(0.7):
            arguments = json.dumps(v.object(), ensure_ascii=v.chance(0.5))
        function: Fields = {"name": v.pick("get_weather", "f", "naïve", ""), "arguments": arguments}
        call: Fields = {"id": f"call_0000000{number}", "type": "function", "function": function}
        v.maybe(function, 0.05, "x", v.json)
        v.maybe(call, 0.05, "index", lambda: number)
        for key in ("id", "type"):
            if v.chance(0.02):
                del call[key]
        if v.chance(0.02):
            del function[v.pick("name", "arguments")]
        return v.reordered(call)

    def _tool(self) -> Any:
        v = self._values
        function: Fields = {"name": v.pick("get_weather", "f", "naïve")}
        v.maybe(function, 0.7, "description", v.text_or_less)
        v.maybe(function, 0.7, "parameters", lambda: v.pick(v.object(), v.object(), None))
        v.maybe(function, 0.1, "strict", v.flag)
        v.maybe(function, 0.03, "defer_loading", v.flag)
        v.maybe(function, 0.05, "x", v.json)
        tool: Fields = {"type": "function", "function": v.reordered(function)}
        v.maybe(tool, 0.05, "x", v.json)
        v.maybe(tool, 0.03, "defer_loading", v.flag)
        if v.chance(0.03):
            del tool["type"]
        return tool
