"""Body rewriting for the two legs of a request (contracts section 3). Pure: bytes in, bytes out.

The sidecar owns `kv_transfer_params`; a client that could set it would make the engine open
connections of the client's choice, so the field is removed wherever it occurs in a body, whatever
escapes or encoding hide it. The decode body is the client's own bytes with members cut out and one
spliced in: what is not touched cannot be restored wrongly. Only the prefill body is parsed and built anew.
"""

from __future__ import annotations

import enum
import json
import math
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

from engine_plugin import wire as engine_wire
from sidecar import json_bytes
from sidecar.errors import BodyInvalid, BodyTooLarge

_KEY: Final = engine_wire.KV_TRANSFER_PARAMS
_KEY_BYTES: Final = _KEY.encode()
# an escape that stands for a character of an owned name (all are `_` or `a`-`v`)
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[567]")
# parsed, a body of the shortest values is 20 times as large; a prompt of a million token ids is below this
MAX_VALUES: Final = 2_000_000
_OBJECT_START: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*(\})?")


class Api(enum.Enum):
    """A route that generates tokens; the value is its path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    GENERATE = "/inference/v1/generate"


_APIS: Final = {api.value: api for api in Api}


def api_of(method: str, path: str) -> Api | None:
    """The generating route of a request, or None; `path` is decoded, without query."""
    return _APIS.get(path.rstrip("/") or "/") if method == "POST" else None


def request_id_or_fresh(decision_id: str | None) -> str:
    """`kv_request_id`: the decision's id when it is a version 4 UUID, else a new one."""
    if decision_id:
        try:
            parsed = uuid.UUID(decision_id)
        except ValueError:
            parsed = None
        if parsed is not None and parsed.version == 4:
            return str(parsed)
    return str(uuid.uuid4())


# --- what each leg carries -------------------------------------------------------------------


def pull_params(kv_request_id: str, host: str, port: int) -> dict[str, Any]:
    """Aggregated request with a source."""
    return {engine_wire.REMOTE_KV_SOURCE: engine_wire.kv_source_params(kv_request_id, host, port)}


def offloading_prefill_params(kv_request_id: str, pull: Mapping[str, Any] | None) -> dict[str, Any]:
    """`offloading`, prefill leg; `pull` (from `pull_params`) is merged in."""
    return {
        engine_wire.REMOTE_DECODER: {engine_wire.KV_REQUEST_ID: kv_request_id},
        **(pull or {}),
    }


def offloading_decode_params(kv_request_id: str, host: str, port: int) -> dict[str, Any]:
    """`offloading`, decode leg: never together with a source, which the prefill leg carries."""
    return {engine_wire.REMOTE_PREFILLER: engine_wire.kv_source_params(kv_request_id, host, port)}


def nixl_prefill_params(pull: Mapping[str, Any] | None) -> dict[str, Any]:
    """`nixlv2`, prefill leg; `pull` is merged in."""
    return {**engine_wire.nixl_prefill_params(), **(pull or {})}


# --- the client's body -----------------------------------------------------------------------


def is_suspicious(raw: bytes, owned: Collection[str] = (_KEY,)) -> bool:
    """Whether a body has to be parsed to know that no owned name is in it: cheap, never a false no.

    The name in clear, an escape that could spell one of its letters, or a NUL, which UTF-8 JSON never
    contains and UTF-16 always does.
    """
    # the first test is 100 times as fast as the last one, the second one twice (line feeds are escapes, too)
    has_escape = b"\\" in raw and b"\\u00" in raw and _ESCAPED_LETTER.search(raw)
    return bool(has_escape) or b"\0" in raw or any(name.encode() in raw for name in owned)


def has_too_many_values(raw: bytes) -> bool:
    """Whether parsing a body would cost memory and time out of proportion: never a false no.

    Every value stands behind a comma or an opening bracket; those inside of texts count, too.
    """
    return len(raw) > MAX_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) >= MAX_VALUES


def without_client_params(raw: bytes, owned: Collection[str] = (_KEY,)) -> bytes:
    """`raw` with every member named in `owned` removed at any depth; the same object if there is none.

    All other bytes stay as the client wrote them (UTF-16 and UTF-32 become UTF-8). A large body that
    `is_suspicious` costs time: about 0.7 s for 1 MB of the shortest members.

    Raises:
        BodyInvalid: suspicious, and not JSON in any encoding an engine would accept.
        BodyTooLarge: suspicious, and more values than can be looked through.
    """
    if not is_suspicious(raw, owned):
        return raw
    if has_too_many_values(raw):
        raise BodyTooLarge(
            f"The request body may hold at most {MAX_VALUES:,} values where it may name a sidecar's field"
        )
    try:
        json.loads(raw)
        text = raw.decode(json.detect_encoding(raw), "surrogatepass").encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError) as error:
        raise BodyInvalid(f"The request body is not valid JSON: {type(error).__name__}") from error
    cleaned = text
    for name in owned:
        cleaned = json_bytes.without_members(cleaned, name)
    return raw if cleaned is text and text == raw else cleaned


def with_params(raw: bytes, params: Mapping[str, Any]) -> bytes | None:
    """`with_members` for `kv_transfer_params` alone."""
    return with_members(raw, {_KEY: params})


def with_members(raw: bytes, members: Mapping[str, Any]) -> bytes | None:
    """`raw` with `members` (at least one) as its first, every other byte as it was.

    `raw` comes from `without_client_params`. None when it is not the text of a JSON object.
    """
    start = _OBJECT_START.match(raw)
    if start is None:
        return None
    brace = raw.index(b"{") + 1
    comma = b"" if start.group(1) else b","
    return b"".join((raw[:brace], orjson.dumps(members)[1:-1], comma, raw[brace:]))


def parse_object(raw: bytes) -> dict[str, Any] | None:
    """The body as a mapping, or None when it is not a JSON object that can be written again, or too large."""
    if has_too_many_values(raw):
        return None
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:  # lone surrogates, which Python engines accept
            document = json.loads(raw, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            return None
    return document if isinstance(document, dict) else None


def _finite(text: str) -> float:
    """NaN and infinities would become null in another body: refuse them instead."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} has no standard form")
    return value


def unsplittable(api: Api, body: Mapping[str, Any]) -> str | None:
    """Why one engine has to serve the whole request, or None.

    Log-probabilities of the prompt exist only where the prompt ran; a stored response and a beam
    search are state of one engine.
    """
    sampling = body.get("sampling_params") if api is Api.GENERATE else body
    if isinstance(sampling, dict) and sampling.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if api is Api.COMPLETIONS and body.get("echo"):
        return "echo"
    if body.get("use_beam_search"):
        return "beam_search"
    if api is Api.RESPONSES and (body.get("background") or body.get("previous_response_id")):
        return "stored_response"
    return None


def prefill_body(api: Api, body: Mapping[str, Any], members: Mapping[str, Any]) -> bytes:
    """Body of the prefill leg: the same prompt, one output token, no streaming, with `members` added.

    `body` is not changed, so that the decode leg has the client's values.
    """
    leg = {**body, **members}
    leg["stream"] = False
    leg.pop("stream_options", None)
    if leg.get("store"):
        leg["store"] = False
    if api is Api.RESPONSES:
        leg["max_output_tokens"] = 1
    elif api is Api.GENERATE:
        sampling = leg.get("sampling_params")
        leg["sampling_params"] = _one_token(dict(sampling) if isinstance(sampling, dict) else {})
    else:
        _one_token(leg)
        if api is Api.CHAT or "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = 1
    try:
        return orjson.dumps(leg)
    except TypeError:  # a lone surrogate or an integer that only the standard library writes
        return json.dumps(leg, separators=(",", ":")).encode()


def _one_token(fields: dict[str, Any]) -> dict[str, Any]:
    """One output token and one sequence in place; a minimum may not exceed the maximum."""
    fields["max_tokens"] = 1
    for name in ("min_tokens", "n", "max_output_tokens"):
        if fields.get(name) is not None:
            fields[name] = 1
    fields.pop("best_of", None)
    return fields


def prefill_answer_params(answer: bytes) -> dict[str, Any] | None:
    """`kv_transfer_params` of a nixlv2 prefill answer, or None when there are none to use."""
    document = parse_object(answer)
    params = document.get(_KEY) if document is not None else None
    return params if isinstance(params, dict) and params else None
