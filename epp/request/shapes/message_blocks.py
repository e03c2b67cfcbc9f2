"""Content blocks of Anthropic messages: to the parts, calls, results and reasoning that the engine renders.

Semantics: vLLM 0.32 `entrypoints/anthropic`. A tool result becomes messages of its own, in front of the one
that it came in; a block that the engine leaves out is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from epp.request.prompts import NoPrompt, Reason
from epp.request.shapes.fields import check_numbers, read_dict, read_list, read_text

Message = dict[str, Any]


@dataclass(slots=True)
class _Parts:
    """What the blocks of one message come to."""

    role: str
    earlier: list[Message]
    content: list[Message] = field(default_factory=list)
    tool_calls: list[Message] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def message(self) -> Message:
        shaped: Message = {"role": self.role}
        if self.reasoning:
            shaped["reasoning"] = "".join(self.reasoning)
        if self.tool_calls:
            shaped["tool_calls"] = self.tool_calls
        if len(self.content) == 1 and self.content[0]["type"] == "text":
            shaped["content"] = self.content[0]["text"]
        elif self.content:
            shaped["content"] = self.content
        return shaped


def append_message(messages: list[Message], role: str, blocks: list[Any]) -> None:
    """Append what `blocks` of `role` (user or assistant) come to; of a user's nothing may be left.

    Raises:
        NoPrompt: the engine refuses it, or it is not read here.
    """
    parts = _Parts(role, messages)
    for block in blocks:
        block = read_dict(block, Reason.MESSAGES_SHAPE)
        kind = block.get("type")
        reader = _BLOCKS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise NoPrompt(Reason.MESSAGES_SHAPE)
        reader(parts, block)
    shaped = parts.message()
    if role == "assistant" or "content" in shaped:
        messages.append(shaped)


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _read_text_block(parts: _Parts, block: Message) -> None:
    text = block.get("text")
    if text is not None and read_text(text, Reason.MESSAGES_SHAPE):
        parts.content.append(_text_part(text))


def _read_image(parts: _Parts, block: Message) -> None:
    source = block.get("source")
    if source is not None and read_dict(source, Reason.MESSAGES_SHAPE):
        parts.content.append(_image_part(_image_url(source)))


def _image_part(url: str) -> Message:
    return {"type": "image_url", "image_url": {"url": url}}


def _image_url(source: Message) -> str:
    if source.get("type") == "url":
        return read_text(source.get("url", ""), Reason.MESSAGES_SHAPE)
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _read_thinking(parts: _Parts, block: Message) -> None:
    thinking = block.get("thinking")
    if thinking is not None:
        parts.reasoning.append(read_text(thinking, Reason.MESSAGES_SHAPE))


def _read_tool_use(parts: _Parts, block: Message) -> None:
    arguments = block.get("input")
    check_numbers(arguments)
    call_id = read_text(block.get("id"), Reason.MESSAGES_SHAPE)
    if not call_id:
        raise NoPrompt(Reason.MESSAGES_SHAPE)  # the engine makes one of the time
    function = {  # in the order in which the engine's validation of chats leaves them
        "arguments": {} if arguments is None else read_dict(arguments, Reason.MESSAGES_SHAPE),
        "name": read_text(block.get("name") or "", Reason.MESSAGES_SHAPE),
    }
    parts.tool_calls.append({"id": call_id, "function": function, "type": "function"})


def _read_tool_result(parts: _Parts, block: Message) -> None:
    """A user's result: its text, then a user's message of its pictures, then the tools that it names."""
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        for item in read_list(content, Reason.MESSAGES_SHAPE):
            read_dict(item, Reason.MESSAGES_SHAPE)
    if parts.role != "user":
        check_numbers(content)
        parts.content.append(_text_part(f"Tool result: {content or ''}"))  # of a list, as Python writes it
        return
    result = {
        "role": "tool",
        "tool_call_id": read_text(block.get("tool_use_id") or "", Reason.MESSAGES_SHAPE),
    }
    if content is None or isinstance(content, str):
        parts.earlier.append(result | {"content": content or ""})
        return
    images = [_image_part(url) for url in map(_image_url, _sources(content)) if url]
    references = [{"type": "tool_reference", "name": name} for name in _referred(content)]
    parts.earlier.append(result | {"content": "\n".join(_texts(content))})
    if images:
        parts.earlier.append({"role": "user", "content": images})
    if references:
        parts.earlier.append(result | {"content": references})


def _texts(content: list[Message]) -> list[str]:
    texts = [item.get("text", "") for item in content if item.get("type") == "text"]
    return [read_text(text, Reason.MESSAGES_SHAPE) for text in texts]


def _sources(content: list[Message]) -> list[Message]:
    sources = [item.get("source", {}) for item in content if item.get("type") == "image"]
    return [read_dict(source, Reason.MESSAGES_SHAPE) for source in sources]


def _referred(content: list[Message]) -> list[str]:
    references = (item for item in content if item.get("type") == "tool_reference")
    names = (reference.get("tool_name") or reference.get("name") for reference in references)
    return [read_text(name, Reason.MESSAGES_SHAPE) for name in names if name]


def _skip(_: _Parts, __: Message) -> None:
    """Encrypted thinking, a tool that is named outside of a result: the engine leaves it out."""


_BLOCKS: Final[dict[str, Callable[[_Parts, Message], None]]] = {
    "text": _read_text_block,
    "image": _read_image,
    "thinking": _read_thinking,
    "redacted_thinking": _skip,
    "tool_reference": _skip,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
}
