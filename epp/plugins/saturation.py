"""Saturation detectors: is the pool full, and which endpoints are. Semantics: llm-d-router at ebab687;
what unknown means: `unknown`.

As a detector it answers one number for the pool, 1.0 and more being full. As a filter in a profile it
drops single endpoints above their limit, with `headroom` for bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import AliasChoices, Field

from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import MAX_TOKENS, DurationS, Parameters
from epp.plugins.plugin_type import LOAD_NEED, METRICS_NEED, Inputs, Kind, PluginType
from epp.plugins.unknown import mean_of_known

EMPTY_POOL = 1.0  # nobody could take a request


class UtilizationDetectorParameters(Parameters):
    """`whenUnknown` is ours: what holds while not one endpoint's metrics are known. The reference stops
    all traffic then (`closed`); the default here lets it flow, and the scrape shows as late."""

    queue_depth_threshold: int = Field(default=5, ge=1, le=MAX_TOKENS)  # waiting requests
    kv_cache_util_threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    metrics_staleness_threshold: DurationS = Field(default=0.2, gt=0.0)  # older metrics are unknown
    headroom: float = Field(default=0.0, ge=0.0, le=100.0)  # of the filter
    when_unknown: Literal["open", "closed"] = "open"


@dataclass(frozen=True, slots=True)
class UtilizationDetector:
    """Mean over the endpoints of max(waiting/threshold, usage/threshold)."""

    name: str
    queue_depth: int = 5
    kv_usage: float = 0.8
    staleness_s: float = 0.2
    headroom: float = 0.0
    open_when_unknown: bool = True

    def saturation(self, candidates: Sequence[Candidate], now_s: float, unbooked: int = 0) -> float:
        """What is on its way counts as waiting, spread over the endpoints."""
        if not candidates:
            return EMPTY_POOL
        mean = mean_of_known(self._level(c, now_s) for c in candidates)
        if mean is None:
            return 0.0 if self.open_when_unknown else 1.0
        return mean + unbooked / len(candidates) / self.queue_depth

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Everybody stays where nobody would: a full pool is the detector's to see."""
        levels = [self._level(c, context.now_s) for c in candidates]
        mean = mean_of_known(levels)
        limit = 1.0 + self.headroom
        kept = [c for c, level in zip(candidates, levels, strict=True) if _below(level, mean, limit)]
        return kept or candidates

    def _level(self, candidate: Candidate, now_s: float) -> float | None:
        metrics = candidate.metrics
        if not metrics.fresh(now_s, self.staleness_s):
            return None
        ratios = [
            value / most
            for value, most in (
                (metrics.waiting_requests, self.queue_depth),
                (metrics.kv_usage, self.kv_usage),
            )
            if value is not None
        ]
        return max(ratios, default=None)


def _below(level: float | None, mean: float | None, limit: float) -> bool:
    value = mean if level is None else level
    return value is None or value < limit


class ConcurrencyDetectorParameters(Parameters):
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = Field(
        default="requests", validation_alias=AliasChoices("concurrencyMode", "mode")
    )
    max_concurrency: int = Field(default=100, ge=1, le=MAX_TOKENS)  # requests of one endpoint
    max_token_concurrency: int = Field(default=1_000_000, ge=1, le=MAX_TOKENS)  # tokens of one endpoint
    headroom: float = Field(default=0.0, ge=0.0, le=100.0)  # of the filter
    in_flight_load_producer_name: str | None = None


@dataclass(frozen=True, slots=True)
class ConcurrencyDetector:
    """What this picker has in flight, over what the endpoints together may have. `hybrid`: the fuller of
    requests and tokens."""

    name: str
    mode: str = "requests"
    max_requests: int = 100
    max_tokens: int = 1_000_000
    headroom: float = 0.0

    def saturation(self, candidates: Sequence[Candidate], now_s: float, unbooked: int = 0) -> float:
        if not candidates:
            return EMPTY_POOL
        requests = unbooked + sum(c.load.requests for c in candidates)
        tokens = sum(c.load.tokens for c in candidates)
        return self._level(requests / len(candidates), tokens / len(candidates))

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        limit = 1.0 + self.headroom
        return [c for c in candidates if self._level(c.load.requests, c.load.tokens) < limit]

    def _level(self, requests: float, tokens: float) -> float:
        by_requests, by_tokens = requests / self.max_requests, tokens / self.max_tokens
        if self.mode == "hybrid":
            return max(by_requests, by_tokens)
        return by_tokens if self.mode == "tokens" else by_requests


def _utilization(name: str, p: UtilizationDetectorParameters, _inputs: Inputs) -> object:
    return UtilizationDetector(
        name,
        p.queue_depth_threshold,
        p.kv_cache_util_threshold,
        p.metrics_staleness_threshold,
        p.headroom,
        p.when_unknown == "open",
    )


def _concurrency(name: str, p: ConcurrencyDetectorParameters, _inputs: Inputs) -> object:
    return ConcurrencyDetector(
        name, p.concurrency_mode, p.max_concurrency, p.max_token_concurrency, p.headroom
    )


ROWS = (
    PluginType(
        "utilization-detector", Kind.DETECTOR, UtilizationDetectorParameters, _utilization, (METRICS_NEED,)
    ),
    PluginType(
        "concurrency-detector", Kind.DETECTOR, ConcurrencyDetectorParameters, _concurrency, (LOAD_NEED,)
    ),
)
