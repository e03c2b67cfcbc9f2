"""What is known of a request after parsing: plain values, and the reasons for knowing no prompt.

A tokeniser consumes the three prompt types and nothing else of a request. None of them shows its
content in a repr, so that none reaches a log by accident.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class RequestKind(enum.Enum):
    """API shape. `OTHER` is everything that is routed by load only."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    TOKENS_IN = "tokens_in"
    OTHER = "other"


class Reason(enum.StrEnum):
    """Why a request is routed by load only. Stable: these are metric labels (docs/requests.md)."""

    # the request as a whole
    NO_BODY = "no_body"
    PATH = "path"
    CONTENT_TYPE = "content_type"
    UNKNOWN_ENCODING = "unknown_encoding"
    BROKEN_ENCODING = "broken_encoding"
    DECODED_SIZE = "decoded_size"
    BODY_SIZE = "body_size"
    BODY_DENSITY = "body_density"
    LENIENT_JSON_SIZE = "lenient_json_size"
    JSON_SHAPE = "json_shape"
    MODEL_SHAPE = "model_shape"
    # a field that the engine refuses, or reads in a way that we do not follow
    PROMPT_SHAPE = "prompt_shape"
    TOKEN_RANGE = "token_range"
    MESSAGES_SHAPE = "messages_shape"
    INPUT_SHAPE = "input_shape"
    INPUT_ITEM = "input_item"
    TOOLS_SHAPE = "tools_shape"
    FLAG_SHAPE = "flag_shape"
    CACHE_SALT_SHAPE = "cache_salt_shape"
    TEMPLATE_KWARGS = "template_kwargs"
    REASONING_SHAPE = "reasoning_shape"
    NUMBER_RANGE = "number_range"
    # what changes the tokens in a way that only the engine knows
    TRUNCATED_PROMPT = "truncated_prompt"
    PROMPT_EMBEDS = "prompt_embeds"
    FORWARDED_TOKENS = "forwarded_tokens"
    SUFFIX = "suffix"
    REQUEST_CHAT_TEMPLATE = "request_chat_template"
    MULTIMODAL = "multimodal"
    SERVER_STATE = "server_state"
    PARTIAL_ITEM = "partial_item"


class NoPrompt(Exception):
    """This request has no prompt that could be matched. It is no error: the request is routed by load."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; `add_special_tokens` adds the model's begin token."""

    text: str = field(repr=False)
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as the client sent them: used as they are. The parser makes an `array("I")`."""

    token_ids: Sequence[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a chat came from that is not of /v1/chat/completions: path of that API, and its fields."""

    path: str
    fields: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation and everything else that reaches the chat template. Messages are those of
    /v1/chat/completions, as the client sent them or as the engine converts another API to them. `items`:
    the kinds of pictures and the like in them; only what is in front of the first can be known.
    `tools_off`: no tool may be called; `thinking_disabled`, `inline_system` (system messages inside the
    conversation): in the way of /v1/messages. What these come to depends on the engine's flags and
    template."""

    messages: list[Any] = field(repr=False)
    tools: list[Any] | None = field(default=None, repr=False)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    add_special_tokens: bool = False
    items: frozenset[str] = frozenset()
    tools_off: bool = False
    thinking_disabled: bool = False
    inline_system: bool = False
    origin: Origin | None = field(default=None, compare=False)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """`prompt` None: routed by load, and `no_prompt` says why. `prompts` counts the prompts of the
    request; the first one decides. `model` empty: the request names none. `size_bytes` is the body as
    it came."""

    kind: RequestKind
    model: str = ""
    prompt: Prompt | None = None
    no_prompt: Reason | None = None
    prompts: int = 0
    stream: bool = False
    cache_salt: str | None = field(default=None, repr=False)
    size_bytes: int = 0
