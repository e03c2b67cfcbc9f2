"""The spans of one request in a sidecar. Off, a leg costs one look at a context variable.

llm_d.pd_proxy.request       from the request's head to the end of its answer
  llm_d.pd_proxy.<leg>       engine, prefill, decode or local: from sending to the answer's head
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar

from sidecar.tracing.spans import TRACEPARENT, Span, SpanContext, SpanKind, Tracer

_current: ContextVar[Span | SpanContext | None] = ContextVar("kvpull_span", default=None)


def begin_request(tracer: Tracer, traceparent: str | None) -> Span | None:
    """Makes it the one that legs of this task, and of tasks begun in it, belong to. None: not sampled."""
    received = tracer.receive(traceparent, "llm_d.pd_proxy.request")
    _current.set(received)
    return received if isinstance(received, Span) else None


def begin_leg(leg: str, headers: MutableMapping[str, str]) -> Span | None:
    """A leg of the current request; `headers` then tell its receiver what it belongs to."""
    current = _current.get()
    if current is None:
        return None
    if isinstance(current, SpanContext):
        headers[TRACEPARENT] = current.traceparent
        return None
    if current.ended_ns:  # a leg that outlives its request
        return None
    span = current.child(f"llm_d.pd_proxy.{leg}", SpanKind.CLIENT)
    headers[TRACEPARENT] = span.context.traceparent
    return span
