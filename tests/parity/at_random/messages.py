"""Requests of Anthropic /v1/messages at random."""

from __future__ import annotations

from typing import Any, Final

from tests.parity.at_random.values import EFFORTS, Values
from tests.parity.chats import Fields

_BLOCKS: Final = {
    "assistant": ("text", "text", "thinking", "tool_use", "redacted_thinking", "tool_result"),
    "user": ("text", "text", "tool_result", "tool_result", "tool_reference"),
    "system": ("text", "text", "text", "tool_addition", "tool_removal", "tool_definition"),
}
_THINKING: Final = (
    {"type": "enabled", "budget_tokens": 2048},
    {"type": "adaptive"},
    {"type": "adaptive", "display": None},
)


class Messages:
    """`images`: parts of chats for it, of which some are put among the others."""

    def __init__(self, values: Values, images: tuple[Fields, ...] = ()) -> None:
        self._values = values
        self._images = images

    def request(self) -> Fields:
        v = self._values
        fields: Fields = {"max_tokens": 4096, "messages": self._conversation()}
        v.maybe(fields, 0.5, "system", lambda: v.pick(v.text(), v.some(self._text, 3), None))
        v.maybe(fields, 0.3, "tools", lambda: v.some(self._tool, 2))
        v.maybe(fields, 0.1, "tool_choice", lambda: {"type": v.pick("auto", "any", "none")})
        v.maybe(fields, 0.15, "thinking", lambda: v.pick(*_THINKING))
        v.maybe(fields, 0.15, "output_config", lambda: {"effort": v.pick(*EFFORTS, None)})
        v.maybe(fields, 0.15, "chat_template_kwargs", v.variables)
        return fields

    def _tool(self) -> Fields:
        v = self._values
        tool: Fields = {"name": v.pick("f", "get_weather"), "input_schema": v.object()}
        v.maybe(tool, 0.6, "description", v.text_or_less)
        v.maybe(tool, 0.1, "strict", v.flag)
        v.maybe(tool, 0.05, "defer_loading", v.flag)
        v.maybe(tool, 0.1, "cache_control", lambda: {"type": "ephemeral"})
        v.maybe(tool, 0.1, "type", lambda: "custom")
        return tool

    def _conversation(self) -> list[Any]:
        v = self._values
        messages: list[Any] = []
        for number in range(v.up_to(3)):
            messages.append({"role": "user", "content": self._content("user", number)})
            messages.append({"role": "assistant", "content": self._content("assistant", number)})
        if v.chance(0.85):
            messages.append({"role": "user", "content": self._content("user", 9)})
        for _ in range(v.up_to(2) if v.chance(0.25) else 0):
            inline = {"role": "system", "content": self._content("system", 0)}
            messages.insert(v.up_to(len(messages)), inline)
        return messages

    def _content(self, role: str, number: int) -> Any:
        v = self._values
        return v.text() if v.chance(0.5) else v.some(lambda: self._block(role, number), 3)

    def _block(self, role: str, number: int) -> Fields:
        v = self._values
        if self._images and role != "system" and v.chance(0.3):
            block = self._image()
        else:
            block = self._of_kind(v.pick(*_BLOCKS[role]), number)
        v.maybe(block, 0.05, "cache_control", lambda: {"type": "ephemeral"})
        return block

    def _of_kind(self, kind: str, number: int) -> Fields:
        v = self._values
        call_id = f"toolu_0000{number}"
        if kind == "text":
            return {"type": kind, "text": v.pick(v.text(), v.text(), v.text(), None)}
        if kind == "thinking":
            return {"type": kind, "thinking": v.text(), "signature": "s"}
        if kind == "redacted_thinking":
            return {"type": kind, "data": "AAAA"}
        if kind == "tool_use":
            return {"type": kind, "id": call_id, "name": "f", "input": v.object()}
        if kind == "tool_result":
            return {"type": kind, "tool_use_id": call_id, "content": self._result()}
        if kind == "tool_definition":
            change = {"type": kind, "definition": self._tool()}
            return {"type": "tool_addition", "tool": change}
        if kind in ("tool_addition", "tool_removal"):
            return {"type": kind, "tool": {"type": "tool_reference", "name": "f"}}
        return {"type": kind, "tool_name": "f"}

    def _text(self) -> Fields:
        return {"type": "text", "text": self._values.text()}

    def _result(self) -> Any:
        v = self._values
        return v.pick(v.text(), v.text(), None, v.some(self._result_item, 3))

    def _result_item(self) -> Fields:
        v = self._values
        reference = {"type": "tool_reference", v.pick("name", "tool_name"): v.pick("f", "")}
        odd = v.pick(reference, {"type": "text"}, {"type": "search_result", "x": 1}, {})
        if self._images and v.chance(0.3):
            return self._image()
        return self._text() if v.chance(0.8) else dict(odd)

    def _image(self) -> Fields:
        v = self._values
        url = v.pick(*self._images)["image_url"]["url"]
        if v.chance(0.3):
            return {"type": "image", "source": {"type": "url", "url": url}}
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source}
