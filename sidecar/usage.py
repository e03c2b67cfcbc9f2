"""Cached tokens in an answer's usage: where each API has them, and what they mean under P/D. Pure.

Meaning, the same in every mode: *prompt tokens that no engine computed for this request*, because
they were in the own cache or came from a peer that had computed them for somebody else. Without a
split the engine's own figure says that. With one, the decode engine counts what the prefill leg has
just computed and handed over; both figures are leading tokens of one prompt, so what neither leg
computed is the smaller of the two. Without a figure of the prefill leg nothing is claimed: 0.

Only the digits change. An answer without a figure gets none, and one that is right stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sidecar.json_bytes import Path, find_values, replaced
from sidecar.kv_params import Api

_MAX_DIGITS: Final = 12
_OPENAI: Final = ("usage", "prompt_tokens_details", "cached_tokens")
_RESPONSES: Final = ("usage", "input_tokens_details", "cached_tokens")
_MESSAGES: Final = ("usage", "cache_read_input_tokens")
_CACHED: Final[Mapping[Api, tuple[Path, ...]]] = {
    Api.COMPLETIONS: (_OPENAI,),
    Api.CHAT: (_OPENAI,),
    Api.GENERATE: (_OPENAI,),
    Api.RESPONSES: (_RESPONSES, ("response", *_RESPONSES)),  # the second in stream events
    Api.MESSAGES: (_MESSAGES, ("message", *_MESSAGES)),
}
_MARKS: Final = {api: paths[0][-1].encode() for api, paths in _CACHED.items()}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one leg's answer says. `input_tokens` is read for Anthropic messages only."""

    cached_tokens: int
    input_tokens: int | None = None


def mentions_cached(api: Api, text: bytes) -> bool:
    """Whether it is worth looking for a figure in `text`: cheap, never a false no."""
    return cached_mark(api) in text


def cached_mark(api: Api) -> bytes:
    """The name of the figure in `api`'s answers, as it stands in their bytes."""
    return _MARKS[api]


def read_usage(api: Api, document: bytes) -> Usage | None:
    """The figures of a whole JSON answer or of one event's data; None where there are none."""
    try:
        parsed = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    for path in _CACHED[api]:
        cached = _count(_at(parsed, path))
        if cached is not None:
            total = _count(_at(parsed, (*path[:-1], "input_tokens"))) if api is Api.MESSAGES else None
            return Usage(cached, total)
    return None


def corrected(api: Api, document: bytes, prefill: Usage | None) -> bytes:
    """A decode answer (or one event's data) with cached tokens as defined above; the same object if
    nothing is wrong. `prefill`: what the prefill leg's answer said, None if that is not known."""
    try:
        orjson.loads(document)
    except orjson.JSONDecodeError:
        return document
    paths = _CACHED[api]
    inputs = {path: (*path[:-1], "input_tokens") for path in paths}
    found = find_values(document, {*paths, *inputs.values()} if api is Api.MESSAGES else set(paths))
    edits: dict[tuple[int, int], bytes] = {}
    for path in paths:
        own = _digits(document, found.get(path))
        if own is None:
            continue
        right = min(own, prefill.cached_tokens if prefill is not None else 0)
        if right == own:
            continue
        edits[found[path]] = b"%d" % right
        total = _digits(document, found.get(inputs[path])) if api is Api.MESSAGES else None
        if total is not None and prefill is not None and _is_exclusive(Usage(own, total), prefill):
            edits[found[inputs[path]]] = b"%d" % (total + own - right)
    return replaced(document, edits) if edits else document


def _is_exclusive(decode: Usage, prefill: Usage) -> bool:
    """Whether input_tokens leaves cached tokens out (as Anthropic defines it; not every engine does).

    Both legs had the same prompt, so exactly one of the two sums agrees where their figures differ.
    """
    if decode.input_tokens is None or prefill.input_tokens is None:
        return False
    return decode.input_tokens + decode.cached_tokens == prefill.input_tokens + prefill.cached_tokens


def _digits(document: bytes, span: tuple[int, int] | None) -> int | None:
    """A count as it stands in the text; anything but plain digits is not ours to change."""
    if span is None or span[1] - span[0] > _MAX_DIGITS:
        return None
    text = document[slice(*span)]
    return int(text) if text.isdigit() else None


def _at(value: Any, path: Path) -> Any:
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 10**_MAX_DIGITS else None
