"""Anthropic /v1/messages: system, blocks and tools to the messages that the engine renders.

Semantics: vLLM 0.32 `entrypoints/anthropic` (`to_chat_completion_request`). Where it puts system messages
inside the conversation depends on what the model's template does with a probe: no prompt here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from epp.request.prompts import ChatPrompt, NoPrompt, Prompt, Reason
from epp.request.shapes.fields import (
    check_effort,
    check_forwarded_tokens,
    check_numbers,
    function_tool,
    read_dict,
    read_list,
    read_template_kwargs,
    read_text,
)

# a line of one client's own that changes with every request; the engine takes it out
_BILLING_HEADER: Final = "x-anthropic-billing-header"

_Message = dict[str, Any]


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    check_forwarded_tokens(fields)
    given = read_list(fields.get("messages"), Reason.MESSAGES_SHAPE)
    messages: list[_Message] = []
    system = _system_text(fields.get("system"))
    if system:
        messages.append({"role": "system", "content": _without_header(system)})
    for message in given:
        _append_message(messages, read_dict(message, Reason.MESSAGES_SHAPE))
    if not messages:
        raise NoPrompt(Reason.MESSAGES_SHAPE)
    choice = fields.get("tool_choice")
    thinking_disabled = _disables_thinking(fields.get("thinking"))
    if thinking_disabled:
        _check_enable_thinking(fields.get("chat_template_kwargs"))
    effort = None if thinking_disabled else _effort(fields)
    prompt = ChatPrompt(
        messages,
        _tools(fields.get("tools")),
        template_kwargs=read_template_kwargs(fields, {"reasoning_effort": effort}),
        tools_off=isinstance(choice, dict) and choice.get("type") == "none",
        thinking_disabled=thinking_disabled,
    )
    return prompt, 1


def _disables_thinking(thinking: Any) -> bool:
    kind = "adaptive" if thinking is None else read_dict(thinking, Reason.REASONING_SHAPE).get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise NoPrompt(Reason.REASONING_SHAPE)
    return kind == "disabled"


def _check_enable_thinking(kwargs: Any) -> None:
    """The engine takes null for a value here and for none later."""
    if isinstance(kwargs, dict) and kwargs.get("enable_thinking", True) in (None, "auto"):
        raise NoPrompt(Reason.TEMPLATE_KWARGS)


def _effort(fields: dict[str, Any]) -> str | None:
    config = fields.get("output_config")
    if config is None:
        return None
    return check_effort(read_dict(config, Reason.REASONING_SHAPE).get("effort"))


def _tools(given: Any) -> list[Any] | None:
    """Tools with a schema; a schema without `type` is one of an object."""
    if given is None:
        return None
    tools = []
    for tool in read_list(given, Reason.TOOLS_SHAPE):
        tool = read_dict(tool, Reason.TOOLS_SHAPE)
        schema = read_dict(tool.get("input_schema"), Reason.TOOLS_SHAPE)
        if "type" not in schema:
            schema = schema | {"type": "object"}
        flags = tool.get("strict"), tool.get("defer_loading")
        tools.append(function_tool(tool.get("name"), tool.get("description"), schema, *flags))
    return tools


# ---- system ----------------------------------------------------------------------------------------


def _system_text(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    texts = []
    for block in read_list(given, Reason.MESSAGES_SHAPE):
        block = read_dict(block, Reason.MESSAGES_SHAPE)
        text = block.get("text")
        if block.get("type") != "text":
            raise NoPrompt(Reason.MESSAGES_SHAPE)
        if text and not read_text(text, Reason.MESSAGES_SHAPE).startswith(_BILLING_HEADER):
            texts.append(text)
    return "".join(texts)


def _without_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text


# ---- messages --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """What the blocks of one message come to; tool results become messages of their own before it."""

    role: str
    earlier: list[_Message]
    texts: list[str] = field(default_factory=list)
    tool_calls: list[_Message] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def message(self) -> _Message:
        shaped: _Message = {"role": self.role}
        if self.reasoning:
            shaped["reasoning"] = "".join(self.reasoning)
        if self.tool_calls:
            shaped["tool_calls"] = self.tool_calls
        if len(self.texts) == 1:
            shaped["content"] = self.texts[0]
        elif self.texts:
            shaped["content"] = [{"type": "text", "text": text} for text in self.texts]
        return shaped


def _append_message(messages: list[_Message], given: _Message) -> None:
    role, content = given.get("role"), given.get("content")
    if role == "system":
        raise NoPrompt(Reason.INLINE_SYSTEM)
    if role not in ("user", "assistant"):
        raise NoPrompt(Reason.MESSAGES_SHAPE)
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts = _Parts(role, messages)
    for block in read_list(content, Reason.MESSAGES_SHAPE):
        block = read_dict(block, Reason.MESSAGES_SHAPE)
        kind = block.get("type")
        reader = _BLOCKS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise NoPrompt(_UNREAD_BLOCKS.get(str(kind), Reason.MESSAGES_SHAPE))
        reader(parts, block)
    shaped = parts.message()
    if role == "assistant" or "content" in shaped:
        messages.append(shaped)


def _read_text_block(parts: _Parts, block: _Message) -> None:
    text = block.get("text")
    if text is not None and read_text(text, Reason.MESSAGES_SHAPE):
        parts.texts.append(text)


def _read_thinking(parts: _Parts, block: _Message) -> None:
    thinking = block.get("thinking")
    if thinking is not None:
        parts.reasoning.append(read_text(thinking, Reason.MESSAGES_SHAPE))


def _read_tool_use(parts: _Parts, block: _Message) -> None:
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


def _read_tool_result(parts: _Parts, block: _Message) -> None:
    content = block.get("content")
    if parts.role != "user":
        parts.texts.append("Tool result: " + read_text(content or "", Reason.MESSAGES_SHAPE))
        return
    call_id = read_text(block.get("tool_use_id") or "", Reason.MESSAGES_SHAPE)
    text = content if isinstance(content, str) else "\n".join(_result_texts(content))
    parts.earlier.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _result_texts(content: Any) -> list[str]:
    texts = []
    for item in [] if content is None else read_list(content, Reason.MESSAGES_SHAPE):
        kind = read_dict(item, Reason.MESSAGES_SHAPE).get("type")
        if kind != "text":
            raise NoPrompt(_UNREAD_BLOCKS.get(str(kind), Reason.MESSAGES_SHAPE))
        texts.append(read_text(item.get("text", ""), Reason.MESSAGES_SHAPE))
    return texts


def _skip(_: _Parts, __: _Message) -> None:
    """Encrypted thinking: the engine leaves it out."""


_BLOCKS: Final[dict[str, Callable[[_Parts, _Message], None]]] = {
    "text": _read_text_block,
    "thinking": _read_thinking,
    "redacted_thinking": _skip,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
}
_UNREAD_BLOCKS: Final = {
    "image": Reason.MULTIMODAL,
    "document": Reason.MULTIMODAL,
    "tool_reference": Reason.TOOL_CHANGE,
    "tool_addition": Reason.TOOL_CHANGE,
    "tool_removal": Reason.TOOL_CHANGE,
}
