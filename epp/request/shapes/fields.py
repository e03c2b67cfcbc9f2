"""Fields that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from epp.request.prompts import NoPrompt, Reason

MAX_CACHE_SALT_CHARS: Final = 1024
REASONING_EFFORTS: Final = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
# fields of the template call that a request must not set through chat_template_kwargs
_CALL_ARGUMENTS: Final = ("self", "messages", "conversation", "tools", "chat_template", "tokenize")
_RESULT_ARGUMENTS: Final = (
    "tokenizer_kwargs",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
)
RESERVED_TEMPLATE_KWARGS: Final = frozenset((*_CALL_ARGUMENTS, *_RESULT_ARGUMENTS))
_EXACT_FLOAT_BELOW: Final = 2.0**63


def read_cache_salt(fields: Mapping[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise NoPrompt(Reason.CACHE_SALT_SHAPE)  # the engine refuses it
    return salt


def read_flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise NoPrompt(Reason.FLAG_SHAPE)
    return value


def read_template_kwargs(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template besides messages and tools: `chat_template_kwargs`, over which the
    request's `own` fields win where they are set. Semantics: vLLM `build_chat_params`."""
    given = fields.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict) or not RESERVED_TEMPLATE_KWARGS.isdisjoint(given):
        raise NoPrompt(Reason.TEMPLATE_KWARGS)
    check_numbers(given)
    merged = {name: value for name, value in (*given.items(), *own.items()) if not _is_unset(value)}
    effort = own.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in given:
        merged["enable_thinking"] = effort != "none"
    for name in ("add_generation_prompt", "continue_final_message"):
        merged.pop(name, None)  # the request's own fields are always set and win
    return merged


def effort_kwargs(effort: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a reasoning effort that the engine sets itself adds to the variables `given` by the client."""
    thinking = {} if "enable_thinking" in given else {"enable_thinking": effort != "none"}
    return {"reasoning_effort": effort} | thinking


def _is_unset(value: Any) -> bool:
    """The engine takes null and "auto" for not given, whoever gave them."""
    return value is None or value == "auto"


def check_forwarded_tokens(fields: Mapping[str, Any]) -> None:
    """Token ids that another engine forwards with a chat replace the chat (P/D decode)."""
    params = fields.get("kv_transfer_params")
    if isinstance(params, dict) and params.get("prompt_token_ids") is not None:
        raise NoPrompt(Reason.FORWARDED_TOKENS)


def check_effort(effort: Any) -> str | None:
    """A reasoning effort an engine knows; another one is refused by it."""
    if effort is None or (isinstance(effort, str) and effort in REASONING_EFFORTS):
        return effort
    raise NoPrompt(Reason.REASONING_SHAPE)


def check_numbers(value: Any) -> None:
    """Refuse integers beyond 64 bits, which a template can print: our JSON parser makes floats of
    them, the engine's does not."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, float) and abs(item) >= _EXACT_FLOAT_BELOW:
            raise NoPrompt(Reason.NUMBER_RANGE)


def read_list(value: Any, reason: Reason) -> list[Any]:
    if not isinstance(value, list):
        raise NoPrompt(reason)
    return value


def read_text(value: Any, reason: Reason) -> str:
    if not isinstance(value, str):
        raise NoPrompt(reason)
    return value


def read_dict(value: Any, reason: Reason) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoPrompt(reason)
    return value


def function_tool(
    name: Any, description: Any, parameters: Any, strict: Any = None, defer_loading: Any = None
) -> dict[str, Any]:
    """A function tool as the engine dumps it for the template: these keys, in this order, the first
    three always present. Semantics: vLLM `ChatCompletionToolsParam`."""
    function: dict[str, Any] = {
        "name": read_text(name, Reason.TOOLS_SHAPE),
        "description": None if description is None else read_text(description, Reason.TOOLS_SHAPE),
        "parameters": None if parameters is None else read_dict(parameters, Reason.TOOLS_SHAPE),
    }
    check_numbers(parameters)
    for key, value in (("strict", strict), ("defer_loading", defer_loading)):
        if value is not None:
            if not isinstance(value, bool):
                raise NoPrompt(Reason.TOOLS_SHAPE)
            function[key] = value
    return {"type": "function", "function": function}
