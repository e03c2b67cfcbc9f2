"""A prompt as a render call: path and body, with everything that decides about its tokens and nothing else.

Why a module: the render endpoint takes chats as clients send them and puts them into its own form
first, so a conversation that another API came from has to survive that. Where it would not, the endpoint of
that API is asked (/v1/responses, /v1/messages), or the prompt is `Unwritable`: no match, never a near miss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from epp.request.parse import ChatPrompt, TextPrompt
from epp.request.prompts import Origin
from epp.request.shapes.chat import with_ordered_calls

CHAT_PATH: Final = "/v1/chat/completions/render"
COMPLETION_PATH: Final = "/v1/completions/render"
_RENDER: Final = "/render"


class Unwritable(ValueError):
    """The engine would render something else than this prompt. The message names no content."""


def render_call(prompt: TextPrompt | ChatPrompt, model: str | None) -> tuple[str, bytes]:
    """Path and body of a call for the token ids of `prompt`.

    Raises:
        Unwritable: what JSON or the engine's validation would not let through as it is: lone surrogates,
            numbers beyond 64 bits, tool calls with their keys in another order; what the endpoint does not
            do as the server does (thinking switched off in /v1/messages).
    """
    path, fields = _call(prompt)
    return path, _dumps(fields | ({} if model is None else {"model": model}))


def _call(prompt: TextPrompt | ChatPrompt) -> tuple[str, dict[str, object]]:
    if isinstance(prompt, TextPrompt):
        return COMPLETION_PATH, {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
    if prompt.thinking_disabled:
        raise Unwritable("only the engine's server does this")
    if prompt.origin is not None and _is_no_chat(prompt):
        return _own_endpoint(prompt.origin, prompt)
    try:
        return CHAT_PATH, _chat_fields(prompt)
    except Unwritable:
        if prompt.origin is None:
            raise
        return _own_endpoint(prompt.origin, prompt)


def _is_no_chat(prompt: ChatPrompt) -> bool:
    """Whether only the endpoint of its own API takes it as it is."""
    return prompt.inline_system or bool(prompt.items) or any(map(_has_input_parts, prompt.messages))


def _has_input_parts(message: Mapping[str, Any]) -> bool:
    """Parts of /v1/responses, which a chat's validation refuses in most roles."""
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == "input_text" for part in content)


def _own_endpoint(origin: Origin, prompt: ChatPrompt) -> tuple[str, dict[str, object]]:
    return origin.path + _RENDER, {**origin.fields, **_payload(prompt)}


def _payload(prompt: ChatPrompt) -> dict[str, object]:
    """Of pictures and the like: their places, not their pixels."""
    return {"mm_payload": "none"} if prompt.items else {}


def _chat_fields(prompt: ChatPrompt) -> dict[str, object]:
    fields: dict[str, object] = {
        "messages": [_message(message) for message in prompt.messages],
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    if prompt.tools == []:
        raise Unwritable("an empty list of tools, which other APIs can come to and this one refuses")
    if prompt.tools is not None:
        fields["tools"] = prompt.tools
        if prompt.tools_off:
            fields["tool_choice"] = "none"
    if prompt.template_kwargs:
        fields["chat_template_kwargs"] = dict(prompt.template_kwargs)
    return fields | _payload(prompt)


def _message(message: Any) -> Any:
    ordered = with_ordered_calls(message)
    if ordered is message:  # no calls
        return message
    calls = ordered["tool_calls"]
    if _dumps(calls) != _dumps(message["tool_calls"]):
        raise Unwritable("keys of a tool call in an order that the engine changes")
    return {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}


def _with_text_arguments(call: Any) -> Any:
    """Arguments that are an object pass the engine's validation only as text, which it decodes again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    arguments = _dumps(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # what only the lenient parser reads
        raise Unwritable("no JSON") from None
