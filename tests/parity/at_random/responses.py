"""Requests of /v1/responses at random."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.parity.at_random.values import EFFORTS, Values
from tests.parity.chats import Fields

_KINDS: Final = ("easy", "easy", "answer", "answer", "output", "reasoning", "call", "custom", "result")
_ROLES: Final = ("user", "user", "system", "developer", "assistant")


class Responses:
    """`images`: parts for it, of which some are put among the others."""

    def __init__(self, values: Values, images: tuple[Fields, ...] = ()) -> None:
        self._values = values
        self._images = images

    def request(self) -> Fields:
        v = self._values
        fields: Fields = {"input": v.text() if v.chance(0.2) else self._items()}
        v.maybe(fields, 0.4, "instructions", v.text_or_less)
        v.maybe(fields, 0.3, "tools", lambda: v.some(self._tool, 2))
        v.maybe(fields, 0.1, "tool_choice", lambda: v.pick("none", "auto", "required"))
        v.maybe(fields, 0.2, "reasoning", lambda: {"effort": v.pick(*EFFORTS, None)})
        v.maybe(fields, 0.15, "chat_template_kwargs", v.variables)
        v.maybe(fields, 0.05, "text", lambda: {"format": {"type": "text"}})
        v.maybe(fields, 0.05, "store", lambda: v.pick(True, False))
        v.maybe(fields, 0.05, "include", lambda: ["reasoning.encrypted_content"])
        return fields

    def _tool(self) -> Fields:
        v = self._values
        if v.chance(0.2):
            return {"type": "custom", "name": "c", "description": v.text()}
        tool: Fields = {"type": "function", "name": v.pick("get_weather", "f")}
        v.maybe(tool, 0.8, "parameters", lambda: v.pick(v.object(), None))
        v.maybe(tool, 0.6, "strict", v.flag)
        v.maybe(tool, 0.6, "description", v.text_or_less)
        v.maybe(tool, 0.05, "defer_loading", lambda: v.pick(True, False))
        return tool

    def _items(self) -> list[Any]:
        v = self._values
        items = [self._item(number) for number in range(v.up_to(6, 1))]
        if v.chance(0.7):
            items.append({"role": "user", "content": v.text()})
        return items

    def _item(self, number: int) -> Fields:
        v = self._values
        makers = {
            "easy": self._easy,
            "answer": self._answer,
            "output": self._output,
            "reasoning": self._reasoning,
            "call": self._call,
            "custom": self._custom_call,
            "result": self._result,
        }
        item = makers[v.pick(*_KINDS)](number)
        v.maybe(item, 0.1, "status", lambda: v.pick("completed", "completed", None))
        return item

    def _easy(self, _: int) -> Fields:
        v = self._values
        plain = v.chance(0.2 if self._images else 0.6)
        item: Fields = {"role": v.pick(*_ROLES), "content": v.text() if plain else v.some(self._input, 3)}
        v.maybe(item, 0.6, "type", lambda: "message")
        return item

    def _answer(self, _: int) -> Fields:
        v = self._values
        item: Fields = {"role": "assistant", "content": v.text()}
        v.maybe(item, 0.6, "type", lambda: "message")
        v.maybe(item, 0.1, "phase", lambda: v.pick("commentary", "final_answer"))
        return item

    def _output(self, number: int) -> Fields:
        v = self._values
        parts = [{"type": "output_text", "text": v.text(), "annotations": []} for _ in range(v.up_to(2, 1))]
        item: Fields = {"type": "message", "role": "assistant", "content": parts}
        v.maybe(item, 0.7, "status", lambda: v.pick("completed", "completed", "incomplete", "in_progress"))
        v.maybe(item, 0.7, "id", lambda: f"msg_{number}")
        if v.chance(0.3):
            del parts[0]["annotations"]
        v.maybe(parts[0], 0.1, "logprobs", lambda: v.pick(None, []))
        return item

    def _reasoning(self, number: int) -> Fields:
        v = self._values
        said = {"type": "reasoning_text", "text": v.text()}
        item: Fields = {
            "type": "reasoning",
            "summary": v.some(lambda: {"type": "summary_text", "text": v.text()}, 2),
        }
        v.maybe(item, 0.7, "id", lambda: f"rs_{number}")
        v.maybe(item, 0.6, "content", lambda: v.pick(None, [], [said]))
        v.maybe(item, 0.1, "encrypted_content", lambda: None)
        return item

    def _call(self, number: int) -> Fields:
        v = self._values
        arguments = v.pick(json.dumps(v.object()), json.dumps(v.object()), "", "{bad", "[]", "null")
        item: Fields = {"type": "function_call", "call_id": self._call_id(), "name": "f"}
        item["arguments"] = arguments
        v.maybe(item, 0.3, "id", lambda: f"fc_{number}")
        return item

    def _custom_call(self, _: int) -> Fields:
        text = self._values.text()
        return {"type": "custom_tool_call", "call_id": self._call_id(), "name": "c", "input": text}

    def _result(self, _: int) -> Fields:
        v = self._values
        kind = v.pick("function_call_output", "custom_tool_call_output")
        output = v.text() if v.chance(0.7) else v.some(self._input, 2)
        return {"type": kind, "call_id": self._call_id(), "output": output}

    def _call_id(self) -> str:
        return f"call_0000000{self._values.up_to(2, 1)}"

    def _input(self) -> Fields:
        v = self._values
        if self._images and v.chance(0.3):
            image = {"type": "input_image", "image_url": v.pick(*self._images)["image_url"]["url"]}
            v.maybe(image, 0.5, "detail", lambda: v.pick("auto", "low", "high"))
            return image
        return {"type": "input_text", "text": v.text()}
