"""Anthropic /v1/messages: system, messages and tools to the chat that the engine renders.

Semantics: vLLM 0.32 `entrypoints/anthropic` (`to_chat_completion_request`). Whether system messages inside
the conversation stay there depends on the model's template: see `epp.request.inline_system`.
"""

from __future__ import annotations

from typing import Any, Final

from epp.request.prompts import ChatPrompt, NoPrompt, Origin, Prompt, Reason
from epp.request.shapes.chat import read_items
from epp.request.shapes.fields import (
    check_effort,
    check_forwarded_tokens,
    read_dict,
    read_list,
    read_template_kwargs,
    read_text,
)
from epp.request.shapes.message_blocks import Message, append_message
from epp.request.shapes.message_tools import CHANGES, tools_in_force

# a line of one client's own that changes with every request; the engine takes it out
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_PATH: Final = "/v1/messages"
# every field that decides about the tokens, and two that have to be there
_RENDERED: Final = (
    *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"),
    *("model", "max_tokens"),
)


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    check_forwarded_tokens(fields)
    given = [
        read_dict(message, Reason.MESSAGES_SHAPE)
        for message in read_list(fields.get("messages"), Reason.MESSAGES_SHAPE)
    ]
    messages: list[Message] = []
    system = _system_text(fields.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in given:
        _append(messages, message)
    if not messages:
        raise NoPrompt(Reason.MESSAGES_SHAPE)
    choice = fields.get("tool_choice")
    thinking_disabled = _disables_thinking(fields.get("thinking"))
    if thinking_disabled:
        _check_enable_thinking(fields.get("chat_template_kwargs"))
    effort = None if thinking_disabled else _effort(fields)
    prompt = ChatPrompt(
        messages,
        tools_in_force(fields, given),
        template_kwargs=read_template_kwargs(fields, {"reasoning_effort": effort}),
        items=read_items(messages),
        tools_off=isinstance(choice, dict) and choice.get("type") == "none",
        thinking_disabled=thinking_disabled,
        inline_system=any(message.get("role") == "system" for message in given),
        origin=Origin(_PATH, {name: fields[name] for name in _RENDERED if name in fields}),
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


def _append(messages: list[Message], given: Message) -> None:
    role, content = given.get("role"), given.get("content")
    if role == "system":
        text = _inline_text(content)
        if text:
            messages.append({"role": "system", "content": text})
    elif role not in ("user", "assistant"):
        raise NoPrompt(Reason.MESSAGES_SHAPE)
    elif isinstance(content, str):
        messages.append({"role": role, "content": content})
    else:
        append_message(messages, role, read_list(content, Reason.MESSAGES_SHAPE))


# ---- system ----------------------------------------------------------------------------------------


def _system_text(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return _text_of(given, ("text",))


def _inline_text(given: Any) -> str:
    """Of a system message inside the conversation; blocks may change tools, too."""
    if isinstance(given, str):
        return "" if given.startswith(_BILLING_HEADER) else given
    return _text_of(given, ("text", *CHANGES))


def _text_of(given: Any, kinds: tuple[str, ...]) -> str:
    texts = []
    for block in read_list(given, Reason.MESSAGES_SHAPE):
        block = read_dict(block, Reason.MESSAGES_SHAPE)
        if block.get("type") not in kinds:
            raise NoPrompt(Reason.MESSAGES_SHAPE)
        text = block.get("text") if block["type"] == "text" else None
        if text and not read_text(text, Reason.MESSAGES_SHAPE).startswith(_BILLING_HEADER):
            texts.append(text)
    return "".join(texts)
