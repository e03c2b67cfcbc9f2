"""One request while it is served, and what log and span say of it at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from sidecar.http.service import Request
from sidecar.tracing.spans import Span
from sidecar.trust import request_id


@dataclass(slots=True)
class Exchange:
    """One request while it is served; `kind` and `outcome` are what telemetry will say of it."""

    request: Request
    started_s: float
    kind: str = "unplanned"
    outcome: str = "error"
    kv_request_id: str = ""
    span: Span | None = None

    def end_span(self, span: Span) -> None:
        span.set("llm_d.request_id", log_name(self.request))
        span.set("kvpull.plan", self.kind)
        span.set("kvpull.kv_request_id", self.kv_request_id or None)
        span.set("http.response.status_code", self.request.answer.status)
        span.set("total_duration_ms", round((time.monotonic() - self.started_s) * 1e3, 3))
        span.end("" if self.outcome == "complete" else self.outcome)

    def log_end(self, log: logging.Logger) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        log.info(
            "request %s: %s %s, status %s, kv %s, %.1f ms",
            log_name(self.request),
            self.kind,
            self.outcome,
            self.request.answer.status or "-",
            self.kv_request_id or "-",
            (time.monotonic() - self.started_s) * 1e3,
        )


def log_name(request: Request) -> str:
    """The request id as it may stand in a log line."""
    return request_id(request)[:128].encode("ascii", "backslashreplace").decode() or "-"
