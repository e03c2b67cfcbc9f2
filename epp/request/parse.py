"""What a request asks for, read from path, headers and body: the first step of every decision.

Only what routing needs is read, nothing is normalised and the body is never changed: the engine
sees the client's bytes. What we do not understand is routed by load (`prompt` is None and
`no_prompt` says why); a 400 is ours only for broken JSON, which no engine could read. Messages of
errors are stable and never echo the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from epp.core.errors import BadRequest
from epp.request.body import load_object, says_json
from epp.request.decode import content_encodings, decode_body
from epp.request.prompts import (
    ChatPrompt,
    NoPrompt,
    ParsedRequest,
    Prompt,
    Reason,
    RequestKind,
    TextPrompt,
    TokenPrompt,
)
from epp.request.shapes import chat, completions, messages, responses, tokens_in
from epp.request.shapes.fields import read_cache_salt
from epp.request.shapes.vllm_grpc import GRPC_PATHS, parse_grpc

__all__ = [
    "MATCHED_PATHS",
    "ChatPrompt",
    "ParsedRequest",
    "Prompt",
    "Reason",
    "RequestKind",
    "TextPrompt",
    "TokenPrompt",
    "blocks_for_long",
    "parse_request",
]

# What is larger is read in a thread: decoding releases the GIL, and between the steps of reading (count,
# parse, convert) the loop gets its turn. Below, the hop to a thread costs more than it spares.
INLINE_BYTES: Final = 256 << 10
INLINE_ENCODED_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class _Shape:
    kind: RequestKind
    read_prompt: Callable[[dict[str, Any]], tuple[Prompt, int]]


# by the end of the path: a gateway may serve a pool under a prefix
_SHAPES: Final = {
    "/v1/completions": _Shape(RequestKind.COMPLETION, completions.read_prompt),
    "/v1/chat/completions": _Shape(RequestKind.CHAT, chat.read_prompt),
    "/v1/responses": _Shape(RequestKind.RESPONSES, responses.read_prompt),
    "/v1/messages": _Shape(RequestKind.MESSAGES, messages.read_prompt),
    "/inference/v1/generate": _Shape(RequestKind.TOKENS_IN, tokens_in.read_prompt),
}
MATCHED_PATHS: Final = tuple(_SHAPES)


def parse_request(body: bytes, path: str, headers: Mapping[str, str]) -> ParsedRequest:
    """Understand one request. `headers` has lower-case names.

    Cases: no body -> by load; a path with prompts, or a call of vLLM's gRPC API -> its prompt; any other
    path -> by load, with the model where the body names one.

    Raises:
        BadRequest: a path with prompts, a JSON content type, and a body that is no JSON.
    """
    shape = _shape_of(path)
    kind = shape.kind if shape else RequestKind.OTHER
    if not body:
        return ParsedRequest(kind, no_prompt=Reason.NO_BODY)
    if shape is None and path.endswith(GRPC_PATHS):
        return parse_grpc(body)
    try:
        fields = _read_fields(body, headers, may_refuse=shape is not None)
    except NoPrompt as reason:
        no_prompt = Reason.PATH if shape is None else reason.reason
        return ParsedRequest(kind, no_prompt=no_prompt, size_bytes=len(body))
    return _parse_fields(shape, fields, len(body))


def blocks_for_long(body: bytes, headers: Mapping[str, str]) -> bool:
    """Whether `parse_request` belongs in a thread."""
    encoded = bool(content_encodings(headers.get("content-encoding", "")))
    return len(body) > (INLINE_ENCODED_BYTES if encoded else INLINE_BYTES)


def has_prompts(path: str) -> bool:
    """Whether bodies of this path are JSON objects with a prompt."""
    return _shape_of(path) is not None


def _shape_of(path: str) -> _Shape | None:
    plain = path.partition("?")[0].rstrip("/")
    return next((shape for suffix, shape in _SHAPES.items() if plain.endswith(suffix)), None)


def _read_fields(body: bytes, headers: Mapping[str, str], *, may_refuse: bool) -> dict[str, Any]:
    encodings = content_encodings(headers.get("content-encoding", ""))
    if not may_refuse and (encodings or body[:64].lstrip()[:1] != b"{"):
        raise NoPrompt(Reason.PATH)  # multipart and the like: not even tried
    if encodings:
        body = decode_body(body, encodings)
    try:
        return load_object(body)
    except BadRequest:
        if encodings:  # the engine may read this encoding in another way
            raise NoPrompt(Reason.BROKEN_ENCODING) from None
        if not may_refuse or not says_json(headers):
            raise NoPrompt(Reason.CONTENT_TYPE) from None
        raise


def _parse_fields(shape: _Shape | None, fields: dict[str, Any], size_bytes: int) -> ParsedRequest:
    model = fields.get("model")
    prompt: Prompt | None = None
    prompts, no_prompt, cache_salt = 0, None, None
    try:
        if shape is None:
            raise NoPrompt(Reason.PATH)
        cache_salt = read_cache_salt(fields)
        if model is not None and not isinstance(model, str):
            raise NoPrompt(Reason.MODEL_SHAPE)
        prompt, prompts = shape.read_prompt(fields)
    except NoPrompt as reason:
        no_prompt = reason.reason
    return ParsedRequest(
        shape.kind if shape else RequestKind.OTHER,
        model=model if isinstance(model, str) else "",
        prompt=prompt,
        no_prompt=no_prompt,
        prompts=prompts,
        stream=fields.get("stream") is True,
        cache_salt=cache_salt,
        size_bytes=size_bytes,
    )
