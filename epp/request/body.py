"""A body's JSON object, read within bounds on the time it can take.

Why bounds: every JSON parser holds the GIL from the first byte to the last, in whatever thread it
runs, so a large body stops the event loop. What is too large, or consists of too many tiny values, is
not parsed at all: it is routed by load and the engine gets it as it came. Figures: docs/requests.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from epp.core.errors import BadRequest
from epp.request.prompts import NoPrompt, Reason

# a million tokens of text; 8 ms of parsing, 21 ms where every letter is escaped
MAX_PARSED_BYTES: Final = 4 << 20
# from here on a body's structure is counted before it is parsed
COUNTED_FROM_BYTES: Final = 64 << 10
MAX_CONTAINERS: Final = 50_000  # objects and arrays: 3 to 7 ms
MAX_SEPARATORS: Final = 600_000  # a token id each: 50 ms
# what orjson refuses is tried again with the engine's own, slower and more lenient parser
LENIENT_MAX_BYTES: Final = 1 << 20


def says_json(headers: Mapping[str, str]) -> bool:
    """Whether the content type is JSON, as an engine takes a missing one."""
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def load_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        NoPrompt: not read, for its size or structure, or no object.
        BadRequest: broken JSON. The message never shows the body.
    """
    if len(body) > MAX_PARSED_BYTES:
        raise NoPrompt(Reason.BODY_SIZE)
    if len(body) > COUNTED_FROM_BYTES and _too_dense(body):
        raise NoPrompt(Reason.BODY_DENSITY)
    fields = _load(body)
    if not isinstance(fields, dict):
        raise NoPrompt(Reason.JSON_SHAPE)
    return fields


def _too_dense(body: bytes) -> bool:
    """Counts what stands in texts, too: an upper bound."""
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS:
        return True
    return body.count(b",") > MAX_SEPARATORS


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as strict_error:
        if len(body) > LENIENT_MAX_BYTES:
            raise NoPrompt(Reason.LENIENT_JSON_SIZE) from None
        where = f"line {strict_error.lineno} column {strict_error.colno}"
    try:
        return json.loads(body)  # also byte order marks, UTF-16, NaN, lone surrogates
    except (ValueError, RecursionError):
        raise BadRequest(f"the body is not valid JSON ({where})") from None
