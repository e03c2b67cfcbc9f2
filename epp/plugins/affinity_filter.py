"""`prefix-cache-affinity-filter`: stay where the prompt is, as long as waiting there is worth it.
Semantics: llm-d-router at ebab687.

Endpoints that hold at least `affinityThreshold` of the prompt are *warm*. Only they are kept, unless the
queue in front of the best of them would take more than `maxTTFTPenaltyMs` longer than that of the best
other one; a queue takes (tokens that we have sent and that are not computed yet) / peak throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from epp.core.columns import matched_shares
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters, Share
from epp.plugins.plugin_type import (
    LOAD_NEED,
    PRECISE,
    PREFIX_NEED,
    REFERENCE_WEIGHTS,
    Inputs,
    Kind,
    Need,
    PluginType,
    PrefixReader,
    TierWeights,
)
from epp.plugins.prefix_scorer import prompt_tokens_of


class PrefixCacheAffinityParameters(Parameters):
    affinity_threshold: Share = 0.80  # 0: the filter does nothing
    exploration_probability: Share = 0.0  # chance that a request sees everybody
    # written maxTTFTPenaltyMs; 0: always stay with the warm ones
    max_ttft_penalty_ms: float = Field(
        default=18_000.0, ge=0.0, allow_inf_nan=False, alias="maxTTFTPenaltyMs"
    )
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: float = Field(default=15_928.0, gt=0.0, allow_inf_nan=False)  # tokens/s
    prefix_match_info_producer_name: str | None = None
    in_flight_load_producer_name: str | None = None
    latency_prediction_info_producer_name: str | None = None

    @field_validator("ttft_source")
    @classmethod
    def _no_predictor(cls, value: str) -> str:
        if value == "latencyPredictor":
            raise ValueError("latencyPredictor needs predicted-latency-producer, which is not part of kvpull")
        return value


@dataclass(frozen=True, slots=True)
class PrefixCacheAffinityFilter:
    """Unknown caches are not warm: nothing is known that would be worth waiting for."""

    name: str
    threshold: float = 0.80
    exploration: float = 0.0
    max_penalty_ms: float = 18_000.0
    peak_tokens_per_s: float = 15_928.0
    weights: TierWeights = REFERENCE_WEIGHTS
    prefix: PrefixReader = PRECISE

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if len(candidates) < 2 or self.threshold <= 0.0:
            return candidates
        if self.exploration and context.rng.random() < self.exploration:
            return candidates
        tokens = prompt_tokens_of(context, self.prefix)
        warm: list[Candidate] = []
        others: list[Candidate] = []
        shares = matched_shares(
            list(map(self.prefix, candidates)), tokens, self.weights.device, self.weights.cpu
        )
        for candidate, share in zip(candidates, shares, strict=True):
            (others if share is None or share < self.threshold else warm).append(candidate)
        if not warm or not others:
            return candidates
        return candidates if self.max_penalty_ms and self._too_slow(warm, others) else warm

    def _too_slow(self, warm: Sequence[Candidate], others: Sequence[Candidate]) -> bool:
        ahead = min(c.load.tokens for c in warm) - min(c.load.tokens for c in others)
        return ahead / self.peak_tokens_per_s * 1_000.0 > self.max_penalty_ms


def _build(name: str, p: PrefixCacheAffinityParameters, inputs: Inputs) -> object:
    return PrefixCacheAffinityFilter(
        name,
        p.affinity_threshold,
        p.exploration_probability,
        p.max_ttft_penalty_ms,
        p.peak_prefill_throughput,
        inputs.tier_weights,
        inputs.prefix,
    )


ROWS = (
    PluginType(
        "prefix-cache-affinity-filter",
        Kind.FILTER,
        PrefixCacheAffinityParameters,
        _build,
        (PREFIX_NEED, Need(LOAD_NEED.data, LOAD_NEED.parameter, lambda p: p.max_ttft_penalty_ms > 0.0)),
        ignored={"latency_prediction_info_producer_name": "it is read by ttftSource latencyPredictor only"},
    ),
)
