"""What an engine's answer tells as it passes: the first token's moment and the token usage.

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
_VALUE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{)?')
_UNFINISHED_VALUE: Final = re.compile(rb'"usage"[ \t\r\n]*(:[ \t\r\n]*)?\Z')
_DATA_LINE: Final = re.compile(rb"(?:\A|[\r\n])data:")
_LONGEST_OBJECT_BYTES: Final = 8_192  # a usage object is about 200 bytes
_LONGEST_GAP_BYTES: Final = 64  # white space between key and value
_DATA_OVERLAP_BYTES: Final = len(b"\ndata:") - 1


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """None: not reported, or not a count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class UsageScanner:
    """Finds the last `"usage": {...}` object of an answer. `feed` keeps at most a few KiB."""

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
                if len(data) - position <= _LONGEST_OBJECT_BYTES:
                    self._carry = data[position:]
                    return
                end = value.end()
            position = end
        self._carry = _possible_key_start(data)

    def _read_object(self, data: bytes, start: int) -> int | None:
        """Take the JSON object at `start`; returns where it ends, or None while it is incomplete."""
        end = start
        limit = start + _LONGEST_OBJECT_BYTES
        while (end := data.find(b"}", end, limit) + 1) > 0:
            try:
                self.usage = _usage_of(orjson.loads(data[start:end]))
            except orjson.JSONDecodeError:
                continue  # that brace closed an inner object, or stood in a string
            return end
        return None


class FirstDataDetector:
    """True once, when the first SSE `data:` line begins. Comments sent to keep a line open are none."""

    __slots__ = ("_carry",)

    def __init__(self) -> None:
        self._carry = b""

    def feed(self, chunk: bytes) -> bool:
        data = self._carry + chunk
        if _DATA_LINE.search(data):
            return True
        self._carry = data if len(data) < _DATA_OVERLAP_BYTES else _tail(data)
        return False


def _tail(data: bytes) -> bytes:
    """Enough of the end to see a line begin across a cut, and never a false start of the stream."""
    tail = data[-_DATA_OVERLAP_BYTES:]
    return b"." + tail if not tail.startswith((b"\r", b"\n")) else tail


def _possible_key_start(data: bytes) -> bytes:
    """The longest end of `data` that could be the beginning of the key."""
    for length in range(min(len(_KEY) - 1, len(data)), 0, -1):
        if data.endswith(_KEY[:length]):
            return _KEY[:length]
    return b""


def _usage_of(value: object) -> TokenUsage:
    if not isinstance(value, dict):
        return TokenUsage()
    details = value.get("prompt_tokens_details")
    return TokenUsage(
        prompt_tokens=_count(value.get("prompt_tokens")),
        completion_tokens=_count(value.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
