"""`prefix-cache-scorer`: how much of the prompt a candidate holds. Semantics: llm-d-router at ebab687."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from epp.core.columns import matched_shares
from epp.core.types import Candidate, PrefixMatch, ScheduleContext
from epp.plugins.parameters import MAX_TOKENS, Parameters, Share
from epp.plugins.plugin_type import (
    PRECISE,
    PREFIX_NEED,
    REFERENCE_WEIGHTS,
    Inputs,
    Kind,
    PluginType,
    PrefixReader,
    TierWeights,
)
from epp.plugins.unknown import fill_unknown

__all__ = ["ROWS", "PrefixCacheScorer", "PrefixCacheScorerParameters", "TierWeights"]


class PrefixCacheScorerParameters(Parameters):
    prefix_match_info_producer_name: str | None = None
    match_length_weight: Share = 0.0  # share of the score that follows the absolute length
    match_length_scale_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class PrefixCacheScorer:
    """`w*min(1, tokens/scale)^2 + (1-w)*match/total`; match is tier weighted."""

    name: str
    weights: TierWeights = REFERENCE_WEIGHTS
    length_weight: float = 0.0
    length_scale_tokens: int = 8192
    prefix: PrefixReader = PRECISE

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        prompt_tokens = prompt_tokens_of(context, self.prefix)
        weights = self.weights
        matches = list(map(self.prefix, candidates))
        shares = matched_shares(matches, prompt_tokens, weights.device, weights.cpu)
        if self.length_weight:
            shares = [self._with_length(s, m) for s, m in zip(shares, matches, strict=True)]
        return fill_unknown(shares)

    def _with_length(self, share: float | None, match: PrefixMatch) -> float | None:
        if share is None:
            return None
        length = min(1.0, match.expected_tokens / self.length_scale_tokens) ** 2
        return self.length_weight * length + (1 - self.length_weight) * share


def prompt_tokens_of(context: ScheduleContext, prefix: PrefixReader) -> int:
    """Length of the prompt in the tokens that `prefix` was matched by: placements know estimates, too."""
    request = context.request
    if prefix is PRECISE or request.token_ids is not None or request.pieces is None:
        return request.prompt_tokens
    return len(request.pieces)


def _build(name: str, p: PrefixCacheScorerParameters, inputs: Inputs) -> object:
    return PrefixCacheScorer(
        name, inputs.tier_weights, p.match_length_weight, p.match_length_scale_tokens, inputs.prefix
    )


ROWS = (PluginType("prefix-cache-scorer", Kind.SCORER, PrefixCacheScorerParameters, _build, (PREFIX_NEED,)),)
