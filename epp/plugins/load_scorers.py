"""Scorers by load: what engines report, and what this picker itself has sent. Semantics: llm-d-router at
ebab687; what unknown means: `unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import MAX_TOKENS, Parameters, Share
from epp.plugins.plugin_type import LOAD_NEED, METRICS_NEED, Inputs, Kind, PluginType, plain
from epp.plugins.unknown import fill_unknown


def less_is_better(values: Sequence[float | None]) -> Sequence[float]:
    """(max - value) / (max - min); all equal: 1."""
    known = [value for value in values if value is not None]
    if not known:
        return fill_unknown(values)
    low, high = min(known), max(known)
    span = high - low
    if len(known) == len(values):
        return [(high - value) / span for value in known] if span else [1.0] * len(known)
    return fill_unknown([None if v is None else (high - v) / span if span else 1.0 for v in values])


@dataclass(frozen=True, slots=True)
class QueueScorer:
    """By requests that wait in the engine: (max - waiting) / (max - min); all equal: 1."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        return less_is_better([c.metrics.waiting_requests for c in candidates])


@dataclass(frozen=True, slots=True)
class RunningRequestsScorer:
    """By requests that run in the engine: (max - running) / (max - min); all equal: 1."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        return less_is_better([c.metrics.running_requests for c in candidates])


@dataclass(frozen=True, slots=True)
class KvCacheUtilizationScorer:
    """1 - usage of the device tier."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        usage = [c.metrics.kv_usage for c in candidates]
        return fill_unknown([None if u is None else 1.0 - u if u <= 1.0 else 0.0 for u in usage])


class LoadAwareScorerParameters(Parameters):
    threshold: int = Field(default=128, ge=1, le=MAX_TOKENS)  # waiting requests that count as full


@dataclass(frozen=True, slots=True)
class LoadAwareScorer:
    """0.5 * (1 - waiting/threshold): at most 0.5 (nothing waits), 0 from the threshold on."""

    name: str
    threshold: int = 128

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        most = float(self.threshold)
        waiting = [c.metrics.waiting_requests for c in candidates]
        return fill_unknown([None if w is None else 0.5 * (1.0 - min(w, most) / most) for w in waiting])


class ActiveRequestScorerParameters(Parameters):
    request_timeout: str | None = None
    idle_threshold: int = Field(default=0, ge=0)  # requests up to which an endpoint counts as idle
    max_busy_score: Share = 1.0  # ceiling for endpoints that are not idle
    in_flight_load_producer_name: str | None = None


@dataclass(frozen=True, slots=True)
class ActiveRequestScorer:
    """By the requests this picker itself has in flight: idle is 1, the busiest 0, linear between."""

    name: str
    idle_threshold: int = 0
    max_busy_score: float = 1.0

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        requests = [c.load.requests for c in candidates]
        busiest, idle, ceiling = max(requests, default=0), self.idle_threshold, self.max_busy_score
        return [1.0 if n <= idle else ceiling * (busiest - n) / busiest for n in requests]


class TokenLoadScorerParameters(Parameters):
    queue_threshold_tokens: int = Field(default=4_194_304, ge=1, le=MAX_TOKENS)
    in_flight_load_producer_name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLoadScorer:
    """1 - min(1, tokens/threshold), tokens being what this picker has sent there and is not yet computed,
    and what this request would add: the part of its prompt that is not expected in the endpoint's cache.
    Without the latter the holder of a prompt is no better than an idle stranger (each endpoint's part is
    asked of whichever prefix producer is configured)."""

    name: str
    queue_threshold_tokens: int = 4_194_304

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        most, own = self.queue_threshold_tokens, context.request.load_tokens
        scores = []
        for _, _, load, match, placed in candidates:
            held = match.expected_tokens if match.state.has_claim else 0
            if placed.state.has_claim and placed.expected_tokens > held:
                held = placed.expected_tokens
            tokens = load.tokens + (own - held if own > held else 0)
            scores.append(1.0 - tokens / most if tokens < most else 0.0)
        return scores


def _active(name: str, p: ActiveRequestScorerParameters, _inputs: Inputs) -> object:
    return ActiveRequestScorer(name, p.idle_threshold, p.max_busy_score)


def _token_load(name: str, p: TokenLoadScorerParameters, _inputs: Inputs) -> object:
    return TokenLoadScorer(name, p.queue_threshold_tokens)


def _load_aware(name: str, p: LoadAwareScorerParameters, _inputs: Inputs) -> object:
    return LoadAwareScorer(name, p.threshold)


_SCRAPED = (METRICS_NEED,)
ROWS = (
    PluginType("queue-scorer", Kind.SCORER, build=plain(QueueScorer), needs=_SCRAPED),
    PluginType(
        "kv-cache-utilization-scorer", Kind.SCORER, build=plain(KvCacheUtilizationScorer), needs=_SCRAPED
    ),
    PluginType(
        "running-requests-size-scorer", Kind.SCORER, build=plain(RunningRequestsScorer), needs=_SCRAPED
    ),
    PluginType("load-aware-scorer", Kind.SCORER, LoadAwareScorerParameters, _load_aware, _SCRAPED),
    PluginType(
        "active-request-scorer",
        Kind.SCORER,
        ActiveRequestScorerParameters,
        _active,
        (LOAD_NEED,),
        ignored={"request_timeout": "a request counts until its stream ends"},
    ),
    PluginType("token-load-scorer", Kind.SCORER, TokenLoadScorerParameters, _token_load, (LOAD_NEED,)),
)
