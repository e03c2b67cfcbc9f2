"""What is learnt from a response while it passes: status, who served it, moments of output, usage.

Must not change, delay or keep what passes. A compressed answer is not decoded: its usage is unknown.
"""

from __future__ import annotations

import enum

from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc.grpc_answer import GrpcAnswer
from epp.extproc.usage import OutputDetector, UsageScanner
from epp.extproc.wire import MAX_BODY_CHUNK_BYTES

_GRPC = "application/grpc"  # or with `+proto`
_DONE = b"data: [DONE]"  # ends an SSE answer; what stands before it in the same piece is not looked at


class Output(enum.Enum):
    """What a piece of an answer carried."""

    NONE = enum.auto()
    FIRST = enum.auto()
    MORE = enum.auto()  # of a streamed answer


class Answer:
    """One response. Sees every byte, holds a few KiB at most."""

    __slots__ = (
        "_detector",
        "_first_token",
        "_scanner",
        "_served_by",
        "_size_bytes",
        "_streamed",
        "encodings",
        "has_body",
        "may_hold_bytes",
        "status",
    )

    def __init__(self) -> None:
        self.status: int | None = None
        self.has_body = False
        self.encodings: tuple[str, ...] = ()
        self.may_hold_bytes = 0  # of the body, until its end: of a document of known length, nothing is late
        self._served_by: str | None = None
        self._scanner: UsageScanner | GrpcAnswer = UsageScanner()
        self._detector: OutputDetector | GrpcAnswer | None = None
        self._first_token = False
        self._streamed = False
        self._size_bytes = 0

    @property
    def encoded(self) -> bool:
        return bool(self.encodings)

    @property
    def good(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def begin(self, event: ev.ResponseHeaders) -> None:
        status = event.headers.first(":status") or ""
        self.status = int(status) if status.isascii() and status.isdigit() and len(status) == 3 else None
        self._served_by = event.served_by
        kind = (event.headers.first("content-type") or "").partition(";")[0].strip().lower()
        names = (name.strip() for name in ",".join(event.headers.all("content-encoding")).lower().split(","))
        self.encodings = tuple(name for name in names if name not in ("", "identity"))
        length = event.headers.first("content-length") or ""
        if kind == "application/json" and length.isascii() and length.isdigit() and len(length) <= 9:
            self.may_hold_bytes = int(length) if int(length) <= MAX_BODY_CHUNK_BYTES else 0
        self._streamed = kind == "text/event-stream" or kind.startswith(_GRPC)
        if kind.startswith(_GRPC):
            self._detector = self._scanner = GrpcAnswer()  # one reader for both
        elif self._streamed and not self.encoded:
            self._detector = OutputDetector()

    def feed(self, body: bytes) -> Output:
        """Look at the bytes. Of an answer that cannot be read, the first bytes are the first output."""
        if not body:
            return Output.NONE
        self.has_body = True
        self._size_bytes += len(body)
        if not self.encoded and self._scanner is not self._detector:
            self._scanner.feed(body)
        if self.status is not None and not self.good:
            return Output.NONE
        if self._first_token and (self._detector is None or body.startswith(_DONE)):
            return Output.NONE
        if self._detector is not None and not self._detector.feed(body):
            return Output.NONE
        if self._first_token:
            return Output.MORE
        self._first_token = True
        return Output.FIRST

    def outcome(self, *, completed: bool) -> Outcome:
        usage = self._scanner.usage
        return Outcome(
            status=self.status,
            served_by=self._served_by,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            completed=completed,
            streamed=self._streamed,
            response_bytes=self._size_bytes,
        )
