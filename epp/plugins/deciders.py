"""Deciders: whether a request is disaggregated. Semantics: llm-d-router at ebab687."""

from __future__ import annotations

from dataclasses import dataclass

from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters, TokenCount
from epp.plugins.plugin_type import PRECISE, PREFIX_NEED, Inputs, Kind, Need, PluginType, PrefixReader, plain
from epp.plugins.prefix_scorer import prompt_tokens_of


@dataclass(frozen=True, slots=True)
class AlwaysDisaggDecider:
    """Every request gets a prefill endpoint."""

    name: str

    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        return True


class PrefixBasedDeciderParameters(Parameters):
    """`prefixMatchInfoProducerName` is ours: the reference's decider cannot see the precise index."""

    non_cached_tokens: TokenCount = 0  # 0: never split
    prompt_tokens: TokenCount = 0  # prompts shorter than this are never split
    prefix_match_info_producer_name: str | None = None


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
    prefix: PrefixReader = PRECISE

    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        prompt_tokens = prompt_tokens_of(context, self.prefix)
        if self.non_cached_tokens == 0 or prompt_tokens < self.prompt_tokens:
            return False
        return prompt_tokens - self.prefix(decode).expected_tokens >= self.non_cached_tokens


def _prefix_based(name: str, p: PrefixBasedDeciderParameters, inputs: Inputs) -> object:
    return PrefixBasedDecider(name, p.non_cached_tokens, p.prompt_tokens, inputs.prefix)


ROWS = (
    PluginType("always-disagg-pd-decider", Kind.PREFILL_DECIDER, build=plain(AlwaysDisaggDecider)),
    PluginType(
        "prefix-based-pd-decider",
        Kind.PREFILL_DECIDER,
        PrefixBasedDeciderParameters,
        _prefix_based,
        (Need(PREFIX_NEED.data, PREFIX_NEED.parameter, lambda p: p.non_cached_tokens > 0),),
    ),
)
