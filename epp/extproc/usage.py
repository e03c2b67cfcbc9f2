"""What an engine's answer tells as it passes: the moments of its output and the token usage.

Incremental, in bounded memory and independent of how the bytes were cut: JSON and SSE look alike here,
because inside a JSON string a quote is escaped, so the bytes `"usage"` + `:` can only be a key. Must
never change, delay or keep the bytes, and never raise: a wrong shape costs the metric only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import orjson

_KEY: Final = b'"usage"'
# white space of JSON; an SSE event may have its data on several lines
_GAP: Final = rb"(?:[ \t]|[\r\n](?:data:)?)*"
_VALUE: Final = re.compile(rb'"usage"' + _GAP + rb":" + _GAP + rb"(\{)?")
_UNFINISHED_VALUE: Final = re.compile(
    rb'"usage"' + _GAP + rb"(?::" + _GAP + rb")?(?:[\r\n](?:d|da|dat|data)?)?\Z"
)
_BLANK_LINE: Final = re.compile(rb"\r\r|\n\r?\n")  # ends an event, and with it whatever was not finished
_LINE_START: Final = re.compile(rb"[\r\n]data:")
# an SSE field that begins a line; an event's name counts once its line has ended
_SSE_LINE: Final = re.compile(rb"(?:\A|[\r\n])(?:(data:)|event:[ \t]*([\w.]*)[ \t]*(?=[\r\n]))")
# events that an engine sends before, or without, any output
_QUIET_EVENTS: Final = frozenset(
    (b"response.created", b"response.in_progress", b"response.queued", b"ping", b"error")
)
_LONGEST_OBJECT_BYTES: Final = 8_192  # a usage object is about 200 bytes
_LONGEST_GAP_BYTES: Final = 64  # white space between key and value
_LONGEST_LINE_START_BYTES: Final = 64  # of a line that is not known yet: a quiet event's is shorter
_MID_LINE: Final = b"."  # stands for what was before a cut, so that the rest of a line is no beginning
MAX_COUNT: Final = 10**9  # tokens; more is no count


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """None: not reported, or not a count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def updated(self, later: TokenUsage) -> TokenUsage:
        """A stream may report in parts: what `later` does not say stays."""
        return TokenUsage(
            _either(later.prompt_tokens, self.prompt_tokens),
            _either(later.completion_tokens, self.completion_tokens),
            _either(later.cached_tokens, self.cached_tokens),
        )


class UsageScanner:
    """Finds the `"usage": {...}` objects of an answer; the last word counts. Keeps a few KiB at most."""

    __slots__ = ("_carry", "usage")

    def __init__(self) -> None:
        self.usage = TokenUsage()
        self._carry = b""

    def feed(self, chunk: bytes) -> None:
        data = self._carry + chunk if self._carry else chunk
        self._carry = b""
        position = 0
        while (position := data.find(_KEY, position)) >= 0:
            if _UNFINISHED_VALUE.match(data, position):
                if len(data) - position <= _LONGEST_GAP_BYTES:
                    self._carry = data[position:]
                return
            value = _VALUE.match(data, position)
            if value is None or value.group(1) is None:
                position += len(_KEY)
                continue
            end = self._read_object(data, value.start(1))
            if end is None:
                unfinished = len(data) - position <= _LONGEST_OBJECT_BYTES
                if unfinished and not _BLANK_LINE.search(data, position):
                    self._carry = data[position:]
                    return
                end = value.end()
            position = end
        self._carry = _possible_key_start(data)

    def _read_object(self, data: bytes, start: int) -> int | None:
        """Take the JSON object at `start`; returns where it ends, or None while it is incomplete."""
        end = start
        limit = start + _LONGEST_OBJECT_BYTES
        if (blank := _BLANK_LINE.search(data, start, limit)) is not None:
            limit = blank.start()
        while (end := data.find(b"}", end, limit) + 1) > 0:
            try:
                text = _LINE_START.sub(b"\n", data[start:end])
                self.usage = self.usage.updated(_usage_of(orjson.loads(text)))
            except orjson.JSONDecodeError:
                continue  # that brace closed an inner object, or stood in a string
            return end
        return None


class OutputDetector:
    """Tells of each piece of an SSE answer whether an event with output begins in it. Comments that keep
    a line open carry none, nor do events that say that a request was accepted."""

    __slots__ = ("_carry", "_quiet")

    def __init__(self) -> None:
        self._carry = b""
        self._quiet = False

    def feed(self, chunk: bytes) -> bool:
        data = self._carry + chunk
        found = False
        read = 0
        for line in _SSE_LINE.finditer(data):
            read = line.end()
            if line[1] is None:
                self._quiet = line[2] in _QUIET_EVENTS
            else:
                found = found or not self._quiet
                self._quiet = False
        self._carry = _line_start(data, read)
        return found


def _line_start(data: bytes, read: int) -> bytes:
    """The beginning of a line that is still to be known, with the line end before it."""
    start = max(data.rfind(b"\n"), data.rfind(b"\r"), 0)
    known = start < read or len(data) - start > _LONGEST_LINE_START_BYTES
    return _MID_LINE if known else data[start:]


def _either(later: int | None, earlier: int | None) -> int | None:
    return earlier if later is None else later


def _possible_key_start(data: bytes) -> bytes:
    """The longest end of `data` that could be the beginning of the key."""
    for length in range(min(len(_KEY) - 1, len(data)), 0, -1):
        if data.endswith(_KEY[:length]):
            return _KEY[:length]
    return b""


def _usage_of(value: object) -> TokenUsage:
    """Usage of the OpenAI APIs, of /v1/responses, and of Anthropic messages, whose input does not
    count what was cached."""
    if not isinstance(value, dict):
        return TokenUsage()
    if "input_tokens" not in value and "output_tokens" not in value:
        return TokenUsage(
            prompt_tokens=_count(value.get("prompt_tokens")),
            completion_tokens=_count(value.get("completion_tokens")),
            cached_tokens=_detail(value.get("prompt_tokens_details")),
        )
    prompt = _count(value.get("input_tokens"))
    read = _count(value.get("cache_read_input_tokens"))
    if prompt is not None:
        prompt += (read or 0) + (_count(value.get("cache_creation_input_tokens")) or 0)
    cached = _detail(value.get("input_tokens_details"))
    return TokenUsage(prompt, _count(value.get("output_tokens")), read if cached is None else cached)


def _detail(details: object) -> int | None:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        return None
    return value
