"""A body's JSON object, read within bounds on the time it can take.

Why bounds: every JSON parser holds the GIL from the first byte to the last, in whatever thread it
runs, so a large body would stop the event loop. What is too large, or consists of too many tiny values, is
not parsed at all: it is routed by load and the engine gets it as it came. Figures: docs/requests.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from epp.core.errors import BadRequest
from epp.request.prompts import NoPrompt, Reason

# more than a million tokens of text
MAX_PARSED_BYTES: Final = 5 << 20
# from here on a body's structure is counted before it is parsed
COUNTED_FROM_BYTES: Final = 64 << 10
MAX_CONTAINERS: Final = 50_000  # objects and arrays: 3 to 7 ms
MAX_SEPARATORS: Final = 300_000  # a token id each: 20 ms
MAX_MEMBERS: Final = 60_000  # keys of objects, each a new text: 20 ms
MAX_QUOTES: Final = 100_000
# what orjson refuses is tried again with the engine's own, more lenient parser: five times as slow
LENIENT_MAX_BYTES: Final = 1 << 20
LENIENT_MAX_VALUES: Final = 50_000  # separators and containers: 8 ms
LENIENT_MAX_DIGITS: Final = 64  # of an integer: Python's take a third of a millisecond for 4,300
_VALUE_MARKS: Final = (b",", b":", b"{", b"[")


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
    check_size(body)
    fields = _load(body)
    if not isinstance(fields, dict):
        raise NoPrompt(Reason.JSON_SHAPE)
    return fields


def check_size(body: bytes) -> None:
    """Whether parsing it takes no longer than the loop can wait.

    Raises:
        NoPrompt: it is too large, or consists of too many tiny values.
    """
    if len(body) > MAX_PARSED_BYTES:
        raise NoPrompt(Reason.BODY_SIZE)
    if len(body) > COUNTED_FROM_BYTES and _too_dense(body):
        raise NoPrompt(Reason.BODY_DENSITY)


def _too_dense(body: bytes) -> bool:
    """Cheap counts first: they include what stands in texts. Only where those are too many, the texts
    are taken out, unless there are too many of them, too."""
    if not _exceeds(body):
        return False
    quotes = body.count(b'"') - body.count(b'\\"')
    return quotes > MAX_QUOTES or _exceeds(_outside_texts(body))


def _outside_texts(body: bytes) -> bytes:
    """`body` without its strings. Linear whatever the bytes are, which a pattern would not be."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # escaped backslashes first: they come in pairs
    return b"".join(plain.split(b'"')[::2])


def _exceeds(body: bytes) -> bool:
    containers = body.count(b"{") + body.count(b"[")
    return containers > MAX_CONTAINERS or body.count(b",") > MAX_SEPARATORS or body.count(b":") > MAX_MEMBERS


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return load_lenient(body, error)


def load_lenient(body: bytes, strict_error: orjson.JSONDecodeError) -> Any:
    """`body` as the engine's own parser reads it: with byte order marks, UTF-16, NaN, lone surrogates.

    Raises:
        NoPrompt: not read, for its size or structure.
        BadRequest: broken for this parser, too. The message never shows the body.
    """
    if len(body) > LENIENT_MAX_BYTES or sum(map(body.count, _VALUE_MARKS)) > LENIENT_MAX_VALUES:
        raise NoPrompt(Reason.LENIENT_JSON_SIZE) from None
    try:
        return json.loads(body, parse_int=_bounded_int)
    except (json.JSONDecodeError, UnicodeDecodeError):
        where = f"line {strict_error.lineno} column {strict_error.colno}"
        raise BadRequest(f"the body is not valid JSON ({where})") from None
    except (ValueError, RecursionError):  # too many digits, too deep: JSON for other parsers
        raise NoPrompt(Reason.JSON_SHAPE) from None


def _bounded_int(digits: str) -> int:
    if len(digits) > LENIENT_MAX_DIGITS:
        raise ValueError("too many digits")
    return int(digits)
