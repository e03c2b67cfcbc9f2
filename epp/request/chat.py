"""Chat messages and tools in the form in which the engine hands them to the chat template.

Why: a prefix matches only if the router renders exactly what the engine renders, and the engine
reshapes messages first (parts joined, tool arguments decoded, defaults filled in). Semantics:
vLLM 0.32 `renderers/chat_utils` and `renderers/hf`. Pure functions on decoded JSON; inputs are never
changed. It must not repair a request: what the engine would refuse is `Unrenderable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from epp.request.content_format import ContentFormat
from epp.request.items import shown_item

_TEXT_PART_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_NULL: Final = ("text", "refusal")
# keys of a part that its meaning is read from; a template that walks parts sees the others as they came
_READ_PART_KEYS: Final = frozenset(
    ("type", "text", "refusal", "thinking", "name", "closed", "data", "file", "prompt_cache_breakpoint")
)
# a line of one client's own that changes with every request
_BILLING_HEADER: Final = "x-anthropic-billing-header"


class Unrenderable(ValueError):
    """This chat has no exact text here: the engine refuses it, or it holds what we cannot render.

    `reason` is stable and free of request content.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def engine_messages(
    messages: Sequence[Any],
    content_format: ContentFormat,
    *,
    knows_developer: bool = True,
    with_items: bool = False,
) -> list[dict[str, Any]]:
    """`messages` as the engine's template sees them; raises `Unrenderable`. For a template that does
    not know the developer role its messages are part of the one system message. `with_items`: pictures and
    the like may be among the parts, of whose tokens the text then says nothing."""
    if not messages:
        raise Unrenderable("no_messages")
    shaped = [_engine_message(message, content_format, with_items) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in shaped):
        return _with_one_system(shaped)
    return shaped


def engine_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """`tools` as the engine dumps them: `description` and `parameters` present even when not sent,
    in a fixed order, unknown keys dropped."""
    if tools is None:
        return None
    return [_engine_tool(tool) for tool in tools]


def _engine_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise Unrenderable("tool_shape")
    given, deferred = tool.get("function"), tool.get("defer_loading")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise Unrenderable("tool_shape")
    own_deferred = deferred if given.get("defer_loading") is None else given["defer_loading"]
    function: dict[str, Any] = {"name": given["name"]}
    for key, value, kind, kept in (
        ("description", given.get("description"), str, True),
        ("parameters", given.get("parameters"), Mapping, True),
        ("strict", given.get("strict"), bool, False),
        ("defer_loading", own_deferred, bool, False),
    ):
        if value is not None and not isinstance(value, kind):
            raise Unrenderable("tool_shape")
        if kept or value is not None:
            function[key] = value
    return {"type": "function", "function": function} | (
        {} if deferred is None else {"defer_loading": deferred}
    )


def _engine_message(message: Any, content_format: ContentFormat, with_items: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Unrenderable("message_shape")
    role = message["role"]
    content = _content(role, message.get("content"), content_format, with_items)
    shaped: dict[str, Any] = {"role": role, "content": content}
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


# ---- content ---------------------------------------------------------------------------------------


def _content(
    role: str, content: Any, content_format: ContentFormat, with_items: bool
) -> str | list[dict[str, Any]]:
    """Cases: missing or null -> no part; text -> one part; list -> its parts. A template that wants
    text gets the parts that are not empty, on lines; a tool result is one text for every template."""
    parts = _parts(content)
    if role == "system":
        parts = _without_billing_header(parts)
    shaped = [_part(part, with_items) for part in parts]
    if content_format == "string":
        if any(part is not None and "text" not in part for part in shaped):
            raise Unrenderable("multimodal_text")  # the model's own placeholder, in front of all texts
        return "\n".join(part["text"] for part in shaped if part is not None and part["text"])
    kept = [_visible(part, given) for part, given in zip(shaped, parts, strict=True) if part is not None]
    if role == "tool" and all(part["type"] == "text" for part in kept):
        return "\n".join(part["text"] for part in kept)
    return kept


def _parts(content: Any) -> Sequence[Any]:
    """A bare text, alone or among the parts, is a part."""
    if content is None:
        return ()
    if isinstance(content, str):
        content = [content]
    parts = _list_of(content, "content_shape")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _without_billing_header(parts: Sequence[Any]) -> list[Any]:
    """The engine cuts that line, and the part with it if nothing else is there."""
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(_BILLING_HEADER):
            rest = text.partition("\n")[2]
            if not rest:
                continue
            part = {**part, "text": rest}
        kept.append(part)
    return kept


def _part(part: Any, with_items: bool) -> dict[str, Any] | None:
    """`part` as type and text, an item as a template sees it; None: the engine skips it."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise Unrenderable("part_shape")
    kind = part["type"]
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "text": part["name"]}
    field = _TEXT_PART_FIELDS.get(kind)
    if field is None or part.get("uuid") is not None:
        item = shown_item(part) if with_items else None
        if item is None:
            raise Unrenderable("multimodal_part")
        return item
    text = part.get(field)
    if isinstance(text, str):
        return {"type": "text", "text": text}
    if text is None and field in part and kind in _SKIPPED_WHEN_NULL:
        return None
    raise Unrenderable("part_shape")


def _visible(part: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": part["text"]}
    if part["type"] != "text":
        return part
    return part | {key: value for key, value in given.items() if key not in _READ_PART_KEYS}


# ---- roles and calls -------------------------------------------------------------------------------


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system messages, and all of those as one in front if one is not there."""
    renamed = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [message for message in renamed if message["role"] == "system"]
    if len(systems) == 1 and renamed[0] is systems[0]:
        return renamed
    texts = [_flat(message["content"]) for message in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _flat(content: str | list[dict[str, Any]]) -> str:
    return (
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
    )


def _tool_call(call: Any) -> dict[str, Any]:
    """Arguments are an object for every template; what is no JSON object becomes an empty one."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise Unrenderable("tool_calls_shape")
    if call.get("type", "function") != "function":
        raise Unrenderable("tool_calls_shape")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
        except (ValueError, RecursionError) as error:  # too many digits, too deep: the engine refuses
            raise Unrenderable("tool_arguments_json") from error
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _list_of(value: Any, reason: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Unrenderable(reason)
    return value
