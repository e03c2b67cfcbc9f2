"""Pickers: one winner out of the scored, plus fallbacks. Semantics: llm-d-router at ebab687."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from epp.core.types import ScheduleContext, ScoredCandidate
from epp.plugins.parameters import Parameters


class PickerParameters(Parameters):
    max_num_of_endpoints: int = Field(default=1, ge=1)  # the extras become fallback endpoints


@dataclass(frozen=True, slots=True)
class MaxScorePicker:
    """Highest score; ties spread at random (by the request's own generator)."""

    name: str
    max_endpoints: int = 1

    def pick(self, context: ScheduleContext, scored: Sequence[ScoredCandidate]) -> Sequence[ScoredCandidate]:
        order = list(scored)
        context.rng.shuffle(order)
        order.sort(key=lambda s: -s.score)
        return order[: self.max_endpoints]
