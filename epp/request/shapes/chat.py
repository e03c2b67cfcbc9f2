"""/v1/chat/completions: the conversation goes to the template as the client sent it."""

from __future__ import annotations

from typing import Any, Final

from epp.request.items import ITEM_KEYS, shown_item
from epp.request.prompts import ChatPrompt, NoPrompt, Prompt, Reason
from epp.request.shapes.fields import check_forwarded_tokens, check_numbers, read_flag, read_template_kwargs

# request fields that win over the same name in chat_template_kwargs
_OWN_FIELDS: Final = ("documents", "reasoning_effort")
# content parts that are text; the rest stands for something that only the engine can expand
TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text", "refusal", "thinking", "tool_reference"))
_MEDIA_KEYS: Final = frozenset(("uuid", "input_image", *ITEM_KEYS))


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not messages:
        raise NoPrompt(Reason.MESSAGES_SHAPE)
    if tools is not None and not isinstance(tools, list):
        raise NoPrompt(Reason.TOOLS_SHAPE)
    if fields.get("truncate_prompt_tokens") is not None:
        raise NoPrompt(Reason.TRUNCATED_PROMPT)
    if fields.get("chat_template") is not None:
        raise NoPrompt(Reason.REQUEST_CHAT_TEMPLATE)
    check_forwarded_tokens(fields)
    items = read_items(messages)
    check_numbers(tools)
    prompt = ChatPrompt(
        [with_ordered_calls(message) for message in messages],
        tools,
        add_generation_prompt=read_flag(fields, "add_generation_prompt", True),
        continue_final_message=read_flag(fields, "continue_final_message", False),
        template_kwargs=read_template_kwargs(fields, {name: fields.get(name) for name in _OWN_FIELDS}),
        add_special_tokens=read_flag(fields, "add_special_tokens", False),
        items=items,
        tools_off=fields.get("tool_choice") == "none",
    )
    return prompt, 1


def with_ordered_calls(message: Any) -> Any:
    """The engine's validation puts the keys of a tool call into its own order; templates print them."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_ordered_call(call) for call in calls]}


def _ordered_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = _in_order(call["function"], ("arguments", "name"))
    return _in_order({**call, "function": function}, ("id", "function", "type"))


def _in_order(given: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {key: given[key] for key in first if key in given} | given


def read_items(messages: list[Any]) -> frozenset[str]:
    """The kinds of pictures, sounds and the like in a conversation. Refuses one whose parts the engine
    might read in another way."""
    found = set()
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in filter(_is_media, content if isinstance(content, list) else ()):
            item = shown_item(part)
            if item is None:
                raise NoPrompt(Reason.MULTIMODAL)
            found.add(item["type"])
    return frozenset(found)


def _is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type", "text")
    return not _MEDIA_KEYS.isdisjoint(part) or not isinstance(kind, str) or kind not in TEXT_PARTS
