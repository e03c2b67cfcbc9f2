"""What a request asks for, read from path, headers and body: the first step of every decision.

Only what routing needs is read, nothing is normalised and the body is never changed: the engine
sees the client's bytes. What we do not understand is routed by load (`prompt` is None and
`no_prompt` says why); a 400 is ours only where no engine could read the body. Messages of errors
are stable and never echo the body.
"""

from __future__ import annotations

import enum
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from epp.core.errors import BadRequest

# a body that orjson refuses is tried again with the engine's own, slower and more lenient parser
LENIENT_MAX_BYTES: Final = 1 << 20
MAX_CACHE_SALT_CHARS: Final = 1024


class RequestKind(enum.Enum):
    """API shape. `OTHER` is everything that is routed by load only."""

    COMPLETION = "completion"
    CHAT = "chat"
    OTHER = "other"


_GENERATING_PATHS: Final = {
    "/v1/completions": RequestKind.COMPLETION,
    "/v1/chat/completions": RequestKind.CHAT,
}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; `add_special_tokens` adds the model's begin token."""

    text: str = field(repr=False)
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as the client sent them: used as they are."""

    token_ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation and everything else that reaches the chat template, as the client sent it."""

    messages: list[Any] = field(repr=False)
    tools: list[Any] | None = field(default=None, repr=False)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """`prompt` None: routed by load, and `no_prompt` is the stable reason. `prompts` counts the
    prompts of the request; the first one decides."""

    kind: RequestKind
    model: str = ""
    prompt: Prompt | None = None
    no_prompt: str | None = None
    prompts: int = 0
    stream: bool = False
    cache_salt: str | None = field(default=None, repr=False)
    size_bytes: int = 0


class _NoPrompt(Exception):
    """Internal: this request has no prompt that we could match; the argument is the reason."""


def parse_request(body: bytes, path: str, headers: Mapping[str, str]) -> ParsedRequest:
    """Understand one request. `headers` has lower-case names.

    Cases: no body -> by load; compressed body -> by load; a generating path -> its prompt; any
    other path -> by load, with the model where the body names one.

    Raises:
        BadRequest: a generating path with a body that is no JSON object or names no model.
    """
    kind = _kind_of(path)
    if not body:
        return ParsedRequest(kind, no_prompt="no_body")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return ParsedRequest(kind, no_prompt="encoded_body", size_bytes=len(body))
    if kind is RequestKind.OTHER:
        return _parse_other(body)
    try:
        fields = _load_object(body)
    except BadRequest:
        if _says_json(headers):
            raise
        return ParsedRequest(kind, no_prompt="content_type", size_bytes=len(body))
    if fields is None:
        return ParsedRequest(kind, no_prompt="lenient_json_size", size_bytes=len(body))
    return _parse_generating(kind, fields, len(body))


def _kind_of(path: str) -> RequestKind:
    plain = path.partition("?")[0].rstrip("/")
    for suffix, kind in _GENERATING_PATHS.items():
        if plain.endswith(suffix):
            return kind
    return RequestKind.OTHER


def _says_json(headers: Mapping[str, str]) -> bool:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _parse_other(body: bytes) -> ParsedRequest:
    request = ParsedRequest(RequestKind.OTHER, no_prompt="path", size_bytes=len(body))
    if body[:64].lstrip()[:1] != b"{":
        return request
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return request
    model = fields.get("model")
    return ParsedRequest(
        RequestKind.OTHER,
        model=model if isinstance(model, str) else "",
        no_prompt="path",
        stream=fields.get("stream") is True,
        size_bytes=len(body),
    )


def _load_object(body: bytes) -> dict[str, Any] | None:
    """The body's JSON object; None: only a lenient parser might read it, and it is too large to try."""
    fields: Any
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as strict_error:
        if len(body) > LENIENT_MAX_BYTES:
            return None
        try:
            fields = json.loads(body)  # also byte order marks, UTF-16, NaN, lone surrogates
        except (ValueError, RecursionError):
            where = f"line {strict_error.lineno} column {strict_error.colno}"
            raise BadRequest(f"the body is not valid JSON ({where})") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


def _parse_generating(kind: RequestKind, fields: dict[str, Any], size_bytes: int) -> ParsedRequest:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("field `model` must be a non-empty string")
    prompt: Prompt | None = None
    prompts, no_prompt, cache_salt = 0, None, None
    try:
        cache_salt = _cache_salt(fields)
        if fields.get("truncate_prompt_tokens") is not None:
            raise _NoPrompt("truncated_prompt")
        prompt, prompts = _completion(fields) if kind is RequestKind.COMPLETION else _chat(fields)
    except _NoPrompt as reason:
        no_prompt = str(reason)
    return ParsedRequest(
        kind,
        model=model,
        prompt=prompt,
        no_prompt=no_prompt,
        prompts=prompts,
        stream=fields.get("stream") is True,
        cache_salt=cache_salt,
        size_bytes=size_bytes,
    )


def _completion(fields: dict[str, Any]) -> tuple[Prompt, int]:
    """Cases of `prompt`: text; token ids; list of texts; list of token-id lists. What is none of
    these (empty, mixed, missing) gets the engine's own error, so it is only routed."""
    add_special_tokens = _flag(fields, "add_special_tokens", True)
    if fields.get("prompt_embeds") is not None:
        raise _NoPrompt("prompt_embeds")
    given = fields.get("prompt")
    if isinstance(given, str):
        return TextPrompt(given, add_special_tokens), 1
    if not isinstance(given, list) or not given:
        raise _NoPrompt("prompt_shape")
    types = set(map(type, given))
    if types == {int}:
        return _token_prompt(given), 1
    if types == {str}:
        return TextPrompt(given[0], add_special_tokens), len(given)
    if types == {list} and all(set(map(type, ids)) == {int} for ids in given):
        return _token_prompt(given[0]), len(given)
    raise _NoPrompt("prompt_shape")


def _token_prompt(token_ids: list[int]) -> TokenPrompt:
    try:
        array("I", token_ids)  # a fast way to see that all of them fit 32 bits, unsigned
    except OverflowError:
        raise _NoPrompt("token_range") from None
    return TokenPrompt(token_ids)


# fields of the template call that a request must not set through chat_template_kwargs
_RESERVED_TEMPLATE_KWARGS: Final = frozenset(
    ("self", "messages", "conversation", "tools", "chat_template", "tokenize", "bos_token", "eos_token")
)
# request fields that win over the same name in chat_template_kwargs
_OWN_FIELDS: Final = ("documents", "reasoning_effort")


def _chat(fields: dict[str, Any]) -> tuple[Prompt, int]:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not messages:
        raise _NoPrompt("messages_shape")
    if tools is not None and not isinstance(tools, list):
        raise _NoPrompt("tools_shape")
    if fields.get("chat_template") is not None:
        raise _NoPrompt("request_chat_template")
    prompt = ChatPrompt(
        messages,
        tools,
        add_generation_prompt=_flag(fields, "add_generation_prompt", True),
        continue_final_message=_flag(fields, "continue_final_message", False),
        template_kwargs=_template_kwargs(fields),
        add_special_tokens=_flag(fields, "add_special_tokens", False),
    )
    return prompt, 1


def _template_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    """Variables of the template besides messages and tools. Semantics: vLLM `build_chat_params`."""
    given = fields.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict) or not _RESERVED_TEMPLATE_KWARGS.isdisjoint(given):
        raise _NoPrompt("template_kwargs")
    own = {name: fields[name] for name in _OWN_FIELDS if fields.get(name) not in (None, "auto")}
    if "reasoning_effort" in own and "enable_thinking" not in given:
        own["enable_thinking"] = own["reasoning_effort"] != "none"
    merged = given | own
    for name in ("add_generation_prompt", "continue_final_message"):
        merged.pop(name, None)  # the request's own fields are always set and win
    return merged


def _cache_salt(fields: dict[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise _NoPrompt("cache_salt_shape")  # the engine refuses it
    return salt


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _NoPrompt("flag_shape")
    return value
