"""The spans of one request in the picker, under the reference's names. Off, there is no object at all.

gateway.request                   from the first message to the end of the answer
  gateway.request_orchestration   the decision
    score_tokens                  from the prompt's text to its tokens
    run_scheduler_profile         candidates, scores, source
"""

from __future__ import annotations

from epp.core.types import Outcome, SchedulingDecision
from epp.extproc.events import Headers
from sidecar.tracing.spans import TRACEPARENT, Span, SpanContext, Tracer


class RequestTrace:
    """Of one request; every method may be called in any order and costs a few microseconds."""

    __slots__ = ("_decision", "_passed_on", "_request", "_tokenised_ns", "_tracer")

    def __init__(self, tracer: Tracer, headers: Headers) -> None:
        self._tracer = tracer
        received = tracer.receive(headers.first(TRACEPARENT), "gateway.request")
        self._request = received if isinstance(received, Span) else None
        self._passed_on = received.context if isinstance(received, Span) else received
        self._decision: Span | None = None
        self._tokenised_ns = 0
        if self._request is not None:
            self._decision = self._request.child("gateway.request_orchestration")

    @property
    def context(self) -> SpanContext:
        """What the next hop is to continue."""
        return self._passed_on

    def tokenised(self, tokens: int | None) -> None:
        """The prompt's tokens are there; None: they are not known."""
        if self._decision is None:
            return
        span = self._decision.child("score_tokens", started_ns=self._decision.started_ns)
        span.set("llm_d.prompt_tokens", tokens)
        span.end()
        self._tokenised_ns = span.ended_ns

    def decided(self, decision: SchedulingDecision) -> None:
        if self._decision is None or self._request is None:
            return
        profile = self._decision.child("run_scheduler_profile", started_ns=self._tokenised_ns or None)
        profile.set("llm_d.candidates", len(decision.scored))
        profile.end()
        for span in (self._decision, self._request):
            span.set("llm_d.request_id", decision.request_id)
            span.set("kvpull.decision_id", decision.decision_id)
        source = decision.kv_source
        self._decision.set("llm_d.endpoint", decision.destination.address)
        self._decision.set("llm_d.prefill_target", decision.prefill.address if decision.prefill else None)
        self._decision.set("llm_d.kv_cache_source", source.address if source else None)
        self._decision.set("kvpull.source_reason", decision.choice.reason.value)
        self._decision.set("llm_d.prompt_tokens", decision.prompt_tokens)
        self._decision.set("llm_d.cached_tokens", decision.computing_cached_tokens)
        self._decision.end()

    def failed(self, reason: str) -> None:
        """No decision: `reason` is a stable one."""
        for span in (self._decision, self._request):
            if span is not None:
                span.end(reason)

    def ended(self, outcome: Outcome) -> None:
        if self._request is None:
            return
        self._request.set("http.response.status_code", outcome.status)
        self._request.set("llm_d.served_by", outcome.served_by)
        self._request.set("llm_d.input_tokens", outcome.prompt_tokens)
        self._request.set("llm_d.output_tokens", outcome.completion_tokens)
        self._request.set("llm_d.cached_tokens", outcome.cached_tokens)
        if outcome.ttft_s is not None:
            self._request.set("llm_d.ttft_ms", round(outcome.ttft_s * 1e3, 3))
        failed = outcome.status is not None and outcome.status >= 500
        cut = "" if outcome.completed else "not completed"
        self._request.end(f"status {outcome.status}" if failed else cut)
