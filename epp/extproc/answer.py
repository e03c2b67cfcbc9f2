"""What is learnt from a response while it passes: status, who served it, first token, usage.

Must not change, delay or keep what passes.
"""

from __future__ import annotations

from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc.usage import FirstDataDetector, UsageScanner


class Answer:
    """One response. Sees every byte, holds a few KiB at most."""

    __slots__ = ("_detector", "_first_token", "_scanner", "_served_by", "has_body", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        self.has_body = False
        self._served_by: str | None = None
        self._scanner = UsageScanner()
        self._detector: FirstDataDetector | None = None
        self._first_token = False

    @property
    def good(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def begin(self, event: ev.ResponseHeaders) -> None:
        status = event.headers.first(":status") or ""
        self.status = int(status) if status.isascii() and status.isdigit() and len(status) == 3 else None
        self._served_by = event.served_by
        kind = (event.headers.first("content-type") or "").partition(";")[0].strip().lower()
        self._detector = FirstDataDetector() if kind == "text/event-stream" else None

    def feed(self, body: bytes) -> bool:
        """Look at the bytes; True where they are the first that carry output."""
        if not body:
            return False
        self.has_body = True
        self._scanner.feed(body)
        if self._first_token or (self.status is not None and not self.good):
            return False
        self._first_token = self._detector is None or self._detector.feed(body)
        return self._first_token

    def outcome(self, *, completed: bool) -> Outcome:
        usage = self._scanner.usage
        return Outcome(
            status=self.status,
            served_by=self._served_by,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            completed=completed,
        )
