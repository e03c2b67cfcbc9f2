"""`lora-affinity-scorer`: endpoints that have the adapter, or room for it. Semantics: llm-d-router at
ebab687.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epp.core.types import Candidate, LoraState, ScheduleContext
from epp.plugins.plugin_type import METRICS_NEED, Kind, PluginType, plain
from epp.plugins.unknown import NEUTRAL, fill_unknown

RUNNING, ROOM, WAITING, FULL = 1.0, 0.8, 0.6, 0.0


@dataclass(frozen=True, slots=True)
class LoraAffinityScorer:
    """Adapter in use 1, room for one more 0.8, waiting for a place 0.6, else 0. A request for the base
    model needs no place: 0.5 for all (the reference compares the base model's name with adapters)."""

    name: str

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        adapter = context.request.lora_name
        if adapter is None:
            return [NEUTRAL] * len(candidates)
        return fill_unknown([_score(adapter, c.metrics.loras) for c in candidates])


def _score(adapter: str, loras: LoraState | None) -> float | None:
    if loras is None:
        return None
    if adapter in loras.running:
        return RUNNING
    if loras.has_room:
        return ROOM
    return WAITING if adapter in loras.waiting else FULL


ROWS = (
    PluginType("lora-affinity-scorer", Kind.SCORER, build=plain(LoraAffinityScorer), needs=(METRICS_NEED,)),
)
