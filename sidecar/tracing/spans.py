"""Spans and the W3C trace context that joins them (https://www.w3.org/TR/trace-context/). No I/O.

Attributes are numbers, names and addresses of our own: never a prompt, a token, a salt or a secret.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
MAX_ATTRIBUTE_CHARS: Final = 256
Value = str | int | float | bool


class SpanKind(IntEnum):
    """Numbers: OTLP `Span.SpanKind`."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanContext:
    """What crosses a process boundary."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def read_traceparent(text: str | None) -> SpanContext | None:
    """None: there is none, or it is malformed and must not be followed."""
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    if not found[2].strip("0") or not found[3].strip("0"):
        return None
    return SpanContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED))


@dataclass(slots=True)
class Span:
    """Work that began and, once `end` was called, ended. Ending it again changes nothing."""

    name: str
    context: SpanContext
    parent_id: str
    kind: SpanKind
    started_ns: int
    ended_ns: int = 0
    error: str = ""  # a stable reason; empty: all went well
    attributes: dict[str, Value] = field(default_factory=dict)
    _tracer: Tracer | None = field(default=None, repr=False)

    def set(self, name: str, value: Value | None) -> None:
        """None is not said at all."""
        if value is not None:
            self.attributes[name] = value[:MAX_ATTRIBUTE_CHARS] if isinstance(value, str) else value

    def end(self, error: str = "") -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            self.error = error
            self.ended_ns = tracer.now_ns()
            tracer.finished(self)

    def child(self, name: str, kind: SpanKind = SpanKind.INTERNAL, started_ns: int | None = None) -> Span:
        """Begins now, or at `started_ns`."""
        tracer = self._tracer
        assert tracer is not None, "a span that has ended has no new children"
        return tracer.begin(name, self.context, kind, started_ns)


class Tracer:
    """Begins spans and gives ended ones to `export`. Parent-based: a caller's decision is followed."""

    def __init__(
        self,
        export: Callable[[Span], None],
        *,
        ratio: float = 1.0,
        rng: random.Random | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`ratio` of traces that begin here are sampled."""
        self._export = export
        self._ratio = ratio
        self._rng = rng or random.SystemRandom()
        self.now_ns = now_ns

    def receive(self, traceparent: str | None, name: str) -> Span | SpanContext:
        """Of a request that came in: a span, or, where this trace is not sampled, what to pass on."""
        parent = read_traceparent(traceparent)
        if parent is None:
            parent = SpanContext(f"{self._rng.getrandbits(128):032x}", "", self._rng.random() < self._ratio)
        if not parent.sampled:
            return SpanContext(parent.trace_id, parent.span_id or self._span_id(), False)
        return self.begin(name, parent, SpanKind.SERVER)

    def begin(self, name: str, parent: SpanContext, kind: SpanKind, started_ns: int | None = None) -> Span:
        context = SpanContext(parent.trace_id, self._span_id(), True)
        began_ns = self.now_ns() if started_ns is None else started_ns
        return Span(name, context, parent.span_id, kind, began_ns, _tracer=self)

    def finished(self, span: Span) -> None:
        self._export(span)

    def _span_id(self) -> str:
        return f"{self._rng.getrandbits(64) or 1:016x}"
