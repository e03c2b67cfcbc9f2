"""Spans as OTLP/HTTP JSON: `ExportTraceServiceRequest` (opentelemetry-proto 1.x, JSON mapping)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from sidecar.tracing.spans import Span, Value

SCOPE = "kvpull"
_OK, _ERROR = 0, 2  # status codes: unset, error


def encode_spans(spans: Iterable[Span], resource: Mapping[str, str]) -> bytes:
    """The body of one export call."""
    scope = {"scope": {"name": SCOPE}, "spans": [_span(span) for span in spans]}
    return orjson.dumps(
        {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    )


def _span(span: Span) -> dict[str, Any]:
    status: dict[str, Any] = {"code": _ERROR, "message": span.error} if span.error else {"code": _OK}
    return {
        "traceId": span.context.trace_id,
        "spanId": span.context.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.started_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
        "status": status,
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value.encode("utf-8", "replace").decode()}
