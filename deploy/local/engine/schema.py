"""Bodies of the OpenAI API: what is asked, and the refusals that vLLM would give. Pure.

Fields that do not change an emulated answer (temperature, penalties, logprobs, ...) are checked
where vLLM checks them and otherwise ignored. What an emulated model cannot do (several choices,
echo) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.local.engine.errors import ApiError
from deploy.local.engine.kv_params import IllegalTransfer, TransferParams, parse_transfer
from engine_plugin import wire

DEFAULT_COMPLETION_TOKENS = 16
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What both kinds of call have in common."""

    model: str | None
    max_tokens: int | None  # None: as the model likes
    stream: bool
    include_usage: bool
    salt: str | None
    transfer: TransferParams


@dataclass(frozen=True, slots=True)
class CompletionCall:
    sampling: Sampling
    prompts: tuple[Prompt, ...]
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ChatCall:
    sampling: Sampling
    messages: Sequence[Any]
    tools: Sequence[Any] | None
    template: Mapping[str, Any]  # arguments of the chat template
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool


def parse_completion(body: Mapping[str, Any]) -> CompletionCall:
    """Raises ApiError."""
    if body.get("echo"):
        raise ApiError("echo is not supported by the emulated engine", param="echo")
    sampling = _sampling(body, max_tokens=_count(body, "max_tokens", DEFAULT_COMPLETION_TOKENS))
    prompts = _prompts(body.get("prompt"))
    return CompletionCall(sampling, prompts, _flag(body, "add_special_tokens", True))


def parse_chat(body: Mapping[str, Any]) -> ChatCall:
    """Raises ApiError."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ApiError("messages: a list of messages is required", param="messages")
    if not messages:
        raise ApiError("messages: the list must not be empty", param="messages")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ApiError("tools must be a list", param="tools")
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, Mapping):
        raise ApiError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    continues = _flag(body, "continue_final_message", False)
    generates = _flag(body, "add_generation_prompt", True)
    if continues and generates:
        raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    limit = _count(body, "max_completion_tokens", _count(body, "max_tokens", None))
    sampling = _sampling(body, max_tokens=limit)
    special = _flag(body, "add_special_tokens", False)
    return ChatCall(sampling, messages, tools or None, template, generates, continues, special)


def _sampling(body: Mapping[str, Any], *, max_tokens: int | None) -> Sampling:
    _check_number(body, "temperature", lambda v: v >= 0, "must be non-negative")
    _check_number(body, "top_p", lambda v: 0 < v <= 1, "must be in (0, 1]")
    if body.get("n") not in (None, 1):
        raise ApiError("n must be 1 in the emulated engine", param="n")
    stream = _flag(body, "stream", False)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise ApiError("stream_options must be an object", param="stream_options")
    if options is not None and not stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError("model must be a string", param="model")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    try:
        transfer = parse_transfer(body.get(wire.KV_TRANSFER_PARAMS))
    except IllegalTransfer as error:
        raise ApiError(str(error), param=wire.KV_TRANSFER_PARAMS) from error
    include_usage = bool(options and options.get("include_usage"))
    return Sampling(model, max_tokens, stream, include_usage, salt, transfer)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Cases: text, list of texts, list of ids, list of lists of ids; every prompt not empty."""
    if isinstance(value, str):
        found: list[Prompt] = [value]
    elif isinstance(value, list) and value and all(_is_id(item) for item in value):
        found = [tuple(value)]
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        found = list(value)
    elif isinstance(value, list) and value and all(_is_ids(item) for item in value):
        found = [tuple(item) for item in value]
    elif value == [] or value is None:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    else:
        raise ApiError("prompt must be text, token ids, or a list of either", param="prompt")
    if not all(found):
        raise ApiError("The decoder prompt cannot be empty", param="prompt")
    return tuple(found)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_id(item) for item in value)


def _count(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if not _is_id(value):
        raise ApiError(f"{name} must be an integer", param=name)
    if value < 1:
        raise ApiError(f"{name} must be at least 1, got {value}.", param=name)
    return int(value)


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be a boolean", param=name)
    return value


def _check_number(body: Mapping[str, Any], name: str, legal: Any, rule: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not legal(value):
        raise ApiError(f"{name} {rule}", param=name)
