"""Chat messages and tools in the form in which the engine hands them to the chat template.

Why: a prefix matches only if the router renders exactly what the engine renders, and the engine
reshapes messages first (parts joined, tool arguments decoded, defaults filled in). Semantics:
vLLM 0.32 `entrypoints/chat_utils`. Pure functions on decoded JSON; inputs are never changed.
It must not repair a request: what the engine would refuse is `Unrenderable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

ContentFormat = Literal["string", "openai"]

_TEXT_PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Unrenderable(ValueError):
    """This chat has no exact text here: the engine refuses it, or it holds what we cannot render.

    `reason` is stable and free of request content.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def engine_messages(messages: Sequence[Any], content_format: ContentFormat) -> list[dict[str, Any]]:
    """`messages` as the engine's template sees them; raises `Unrenderable`."""
    if not messages:
        raise Unrenderable("no_messages")
    return [_engine_message(message, content_format) for message in messages]


def engine_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """`tools` as the engine dumps them: `description` and `parameters` present even when not sent,
    known keys first, the rest in the client's order."""
    if tools is None:
        return None
    return [_engine_tool(tool) for tool in tools]


def _engine_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise Unrenderable("tool_shape")
    given = tool["function"]
    if not isinstance(given.get("name"), str):
        raise Unrenderable("tool_shape")
    known = {
        "name": given["name"],
        "description": given.get("description"),
        "parameters": given.get("parameters"),
    }
    function = known | {key: value for key, value in given.items() if key not in known}
    rest = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": tool.get("type", "function"), "function": function} | rest


def _engine_message(message: Any, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Unrenderable("message_shape")
    role = message["role"]
    shaped: dict[str, Any] = {"role": role, "content": _content(message.get("content"), content_format)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            shaped["tool_calls"] = [_tool_call(call) for call in _list_of(calls, "tool_calls_shape")]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        shaped["tools"] = message.get("tools")
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            shaped[key] = message[key]
    return shaped


def _content(content: Any, content_format: ContentFormat) -> str | list[dict[str, Any]]:
    """Cases: missing or null -> no part; text -> one part; list -> its parts, each of them text."""
    if content is None:
        texts: list[str] = []
    elif isinstance(content, str):
        texts = [content]
    else:
        texts = [_part_text(part) for part in _list_of(content, "content_shape")]
    if content_format == "openai":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("type"), str):
        field = _TEXT_PART_FIELDS.get(part["type"])
        if field is None:
            raise Unrenderable("multimodal_part")
        if isinstance(part.get(field), str):
            return str(part[field])
    raise Unrenderable("part_shape")


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise Unrenderable("tool_calls_shape")
    arguments = call["function"].get("arguments")
    if not arguments:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise Unrenderable("tool_arguments_json") from error
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _list_of(value: Any, reason: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Unrenderable(reason)
    return value
