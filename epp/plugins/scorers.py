"""Scorers: how good a candidate is, in [0, 1]. Semantics: llm-d-router at ebab687.

One written rule for the unknown everywhere: a candidate whose input is unknown (never scraped,
stale, NaN, no cache claim) gets the mean score of those that are known, and 0.5 where nobody is.
So it is neither preferred as idle nor avoided as full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from epp.core.types import Candidate, PrefixMatch, ScheduleContext
from epp.plugins.parameters import MAX_TOKENS, Parameters, Share

NEUTRAL = 0.5


def fill_unknown(scores: Sequence[float | None]) -> list[float]:
    """Replace None by the mean of the known scores (NEUTRAL where there is none)."""
    known = [s for s in scores if s is not None]
    neutral = sum(known) / len(known) if known else NEUTRAL
    return [neutral if s is None else s for s in scores]


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Worth of a matched block by where it lies (`kvCacheBackendConfigs`; reference defaults)."""

    device: float = 1.0
    cpu: float = 0.8


class PrefixCacheScorerParameters(Parameters):
    prefix_match_info_producer_name: str | None = None
    match_length_weight: Share = 0.0  # share of the score that follows the absolute length
    match_length_scale_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class PrefixCacheScorer:
    """`w*min(1, tokens/scale)^2 + (1-w)*match/total`; match is tier weighted.

    Blocks beyond the device prefix count with the CPU weight, so a device block behind a hole
    counts as CPU: the index reports prefixes, not maps. Speculative blocks beyond those count as
    device blocks: that is where they are being computed.
    """

    name: str
    weights: TierWeights = TierWeights()
    length_weight: float = 0.0
    length_scale_tokens: int = 8192

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        prompt_tokens = context.request.prompt_tokens
        return fill_unknown([self._score(c.match, prompt_tokens) for c in candidates])

    def _score(self, match: PrefixMatch, prompt_tokens: int) -> float | None:
        if not match.state.has_claim:
            return None
        total_blocks = prompt_tokens // match.block_size_tokens if match.block_size_tokens else 0
        if total_blocks == 0:
            return 0.0
        expected = match.expected_blocks
        beyond = match.blocks - match.device_blocks
        weighted = (expected - beyond) * self.weights.device + beyond * self.weights.cpu
        length = min(1.0, expected * match.block_size_tokens / self.length_scale_tokens) ** 2
        return self.length_weight * length + (1 - self.length_weight) * weighted / total_blocks


@dataclass(frozen=True, slots=True)
class QueueScorer:
    """(max - waiting) / (max - min); all equal: 1."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        waiting = [c.metrics.waiting_requests for c in candidates]
        known = [w for w in waiting if w is not None]
        if not known:
            return fill_unknown([None] * len(waiting))
        low, high = min(known), max(known)
        if low == high:
            return fill_unknown([None if w is None else 1.0 for w in waiting])
        return fill_unknown([None if w is None else (high - w) / (high - low) for w in waiting])


@dataclass(frozen=True, slots=True)
class KvCacheUtilizationScorer:
    """1 - usage of the device tier."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        usage = [c.metrics.kv_usage for c in candidates]
        return fill_unknown([None if u is None else 1.0 - min(1.0, max(0.0, u)) for u in usage])


class ActiveRequestScorerParameters(Parameters):
    idle_threshold: int = Field(default=0, ge=0)  # requests up to which an endpoint counts as idle
    max_busy_score: Share = 1.0  # ceiling for endpoints that are not idle


@dataclass(frozen=True, slots=True)
class ActiveRequestScorer:
    """By the requests this picker itself has in flight: idle is 1, the busiest 0, linear between."""

    name: str
    idle_threshold: int = 0
    max_busy_score: float = 1.0

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        busiest = max((c.load.requests for c in candidates), default=0)
        return [self._score(c.load.requests, busiest) for c in candidates]

    def _score(self, requests: int, busiest: int) -> float:
        if requests <= self.idle_threshold:
            return 1.0
        return self.max_busy_score * (busiest - requests) / busiest
