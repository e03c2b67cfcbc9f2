"""Deciders: whether a request is disaggregated. Semantics: llm-d-router at ebab687."""

from __future__ import annotations

from dataclasses import dataclass

from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters, TokenCount


@dataclass(frozen=True, slots=True)
class AlwaysDisaggDecider:
    """Every request gets a prefill endpoint."""

    name: str

    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        return True


class PrefixBasedDeciderParameters(Parameters):
    non_cached_tokens: TokenCount = 0  # 0: never split
    prompt_tokens: TokenCount = 0  # prompts shorter than this are never split


@dataclass(frozen=True, slots=True)
class PrefixBasedDecider:
    """Split when the decode endpoint would have to compute at least `non_cached_tokens` of the prompt.

    Thresholds are in tokens, so prompts shorter than a block follow the same rule (case S-B11). An
    endpoint without a cache claim counts as holding nothing; what is expected there from a request just
    sent counts.
    """

    name: str
    non_cached_tokens: int = 0
    prompt_tokens: int = 0

    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        prompt_tokens = context.request.prompt_tokens
        if self.non_cached_tokens == 0 or prompt_tokens < self.prompt_tokens:
            return False
        return prompt_tokens - decode.match.expected_tokens >= self.non_cached_tokens
