"""Token usage and moments of output in an answer of vLLM's gRPC API, read as it passes.

Frames of `GenerateResponse` (or one `EmbedResponse`), cut anywhere; field numbers: `vllm_engine.proto` as
smg-grpc-proto 0.4.28 publishes it. Only counts are read, token ids are stepped over. Bounded memory; never
raises: what is no such message costs the metric only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from epp.extproc.usage import MAX_COUNT, TokenUsage

FRAME_BYTES: Final = 5  # one byte of flags, four of length
MAX_FRAME_BYTES: Final = 256 << 10  # longer ones pass unread

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CHUNK, _COMPLETE, _EMBED_PROMPT = 1, 2, 2
# field numbers of prompt, completion and cached tokens
_COUNTS: Final = {_CHUNK: (2, 3, 4), _COMPLETE: (3, 4, 5)}


class GrpcAnswer:
    """Of one answer. Stands where `UsageScanner` and `OutputDetector` stand for JSON and SSE."""

    __slots__ = ("_data", "_skip_bytes", "usage")

    def __init__(self) -> None:
        self.usage = TokenUsage()
        self._data = b""
        self._skip_bytes = 0  # of a frame that is not read

    def feed(self, chunk: bytes) -> bool:
        """Whether a message with output ends in `chunk`."""
        skipped = min(self._skip_bytes, len(chunk))
        self._skip_bytes -= skipped
        data, found = self._data + chunk[skipped:], False
        while len(data) >= FRAME_BYTES:
            length = int.from_bytes(data[1:FRAME_BYTES])
            end = FRAME_BYTES + length
            if length > MAX_FRAME_BYTES:
                self._skip_bytes = max(0, end - len(data))
                data = data[end:]
                found = True
            elif end > len(data):
                break
            else:
                found = self._read(data[FRAME_BYTES:end], compressed=bool(data[0])) or found
                data = data[end:]
        self._data = data
        return found

    def _read(self, message: bytes, *, compressed: bool) -> bool:
        if compressed:
            return True
        try:
            parts = list(_fields(message))
            if any(kind == _VARINT for _, kind, _ in parts):  # an EmbedResponse
                return self._note(dict(_numbers(message)), (_EMBED_PROMPT, 0, 0))
            for number, _, value in parts:
                if number in _COUNTS and isinstance(value, bytes):
                    return self._note(dict(_numbers(value)), _COUNTS[number])
        except (IndexError, ValueError):
            return False
        return False

    def _note(self, numbers: dict[int, int], places: tuple[int, int, int]) -> bool:
        """A message that counts nothing says nothing: chunks may leave their counts out."""
        prompt, completion, cached = (numbers.get(place) for place in places)
        if prompt is not None:  # zero is not sent: beside a prompt, what is absent is zero
            self.usage = self.usage.updated(TokenUsage(prompt, completion or 0, cached or 0))
        return True


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    for number, kind, value in _fields(message):
        if kind == _VARINT and isinstance(value, int) and value <= MAX_COUNT:
            yield number, value


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field. Raises IndexError or ValueError: it is no message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            number, at = _varint(message, at)
            yield tag >> 3, kind, number
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("a group, or no wire type")
        if at + size > len(message):
            raise ValueError("a field that ends behind its message")
        yield tag >> 3, kind, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")
