"""`no-hit-lru-scorer`: spread prompts that nobody has. Semantics: llm-d-router at ebab687.

A cold request makes new blocks wherever it goes. Sending it to the endpoint that has had none for the
longest time makes caches grow evenly. It remembers endpoints only, at most `lru_size`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pydantic import Field

from engine_plugin.identity import EndpointId
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import PRECISE, PREFIX_NEED, Inputs, Kind, PluginType, PrefixReader
from epp.plugins.unknown import NEUTRAL


class NoHitLruScorerParameters(Parameters):
    """`prefixPluginType` and `prefixPluginName` were never used by the reference."""

    prefix_plugin_type: str | None = None
    prefix_plugin_name: str | None = None
    prefix_match_info_producer_name: str | None = None
    lru_size: int = Field(default=1024, ge=1, le=1 << 20)  # endpoints remembered


class NoHitLruScorer:
    """A cold request: 1 for endpoints that never had one, then by rank down to 0 for the one that had the
    last. A warm request, or one of which nobody's cache is known: 0.5 for all. Ranks are among the
    candidates; endpoints that never had one tie, so several pickers do not start on the same."""

    def __init__(self, name: str, lru_size: int = 1024, prefix: PrefixReader = PRECISE) -> None:
        self.name = name
        self._size = lru_size
        self._prefix = prefix
        self._used: OrderedDict[EndpointId, None] = OrderedDict()  # longest ago first

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        if not self._is_cold(candidates):
            return [NEUTRAL] * len(candidates)
        if len(candidates) == 1:
            return [1.0]
        ids = [c.endpoint.id for c in candidates]
        present = set(ids)
        used = [endpoint for endpoint in self._used if endpoint in present]
        first = len(ids) - len(used)  # rank of the one that had its cold request longest ago
        last = len(ids) - 1
        scores = {endpoint: 1.0 - (first + rank) / last for rank, endpoint in enumerate(used)}
        return [scores.get(endpoint, 1.0) for endpoint in ids]

    def placed(
        self, context: ScheduleContext, candidates: Sequence[Candidate], targets: Mapping[str, Candidate]
    ) -> Mapping[str, str]:
        """The targets of a cold request have just had one."""
        if self._is_cold(candidates):
            for candidate in targets.values():
                self._used[candidate.endpoint.id] = None
                self._used.move_to_end(candidate.endpoint.id)
            while len(self._used) > self._size:
                self._used.popitem(last=False)
        return {}

    def _is_cold(self, candidates: Sequence[Candidate]) -> bool:
        known = False
        for match in map(self._prefix, candidates):
            if match.state.has_claim:
                known = True
                if match.blocks or match.speculative_blocks:
                    return False
        return known


def _build(name: str, p: NoHitLruScorerParameters, inputs: Inputs) -> object:
    return NoHitLruScorer(name, p.lru_size, inputs.prefix)


ROWS = (
    PluginType(
        "no-hit-lru-scorer",
        Kind.SCORER,
        NoHitLruScorerParameters,
        _build,
        (PREFIX_NEED,),
        ignored=dict.fromkeys(("prefix_plugin_type", "prefix_plugin_name"), "the reference never used it"),
    ),
)
