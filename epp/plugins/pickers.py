"""Pickers: one winner out of the scored, plus fallbacks. Semantics: llm-d-router at ebab687.

They see weighted sums only. Ties and chance follow the request's own generator, so a decision can be
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field

from epp.core.types import ScheduleContext
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import Inputs, Kind, PluginType


class PickerParameters(Parameters):
    max_num_of_endpoints: int = Field(default=1, ge=1)  # the extras become fallback endpoints


@dataclass(frozen=True, slots=True)
class MaxScorePicker:
    """Highest score; ties spread at random."""

    name: str
    max_endpoints: int = 1

    def pick(self, context: ScheduleContext, scores: Sequence[float]) -> Sequence[int]:
        if self.max_endpoints == 1:
            best = max(scores)
            ties = scores.count(best)
            at = scores.index(best)
            for _ in range(context.rng.randrange(ties) if ties > 1 else 0):
                at = scores.index(best, at + 1)
            return (at,)
        order = list(range(len(scores)))
        context.rng.shuffle(order)
        order.sort(key=scores.__getitem__, reverse=True)
        return order[: self.max_endpoints]


@dataclass(frozen=True, slots=True)
class WeightedRandomPicker:
    """Chance in proportion to the score, without repetition (Efraimidis and Spirakis, A-Res). Score 0
    comes after all others; all 0: at random."""

    name: str
    max_endpoints: int = 1

    def pick(self, context: ScheduleContext, scores: Sequence[float]) -> Sequence[int]:
        random = context.rng.random
        keys = [(s > 0.0, random() ** (1.0 / s) if s > 0.0 else random()) for s in scores]
        return sorted(range(len(scores)), key=keys.__getitem__, reverse=True)[: self.max_endpoints]


@dataclass(frozen=True, slots=True)
class RandomPicker:
    """Anybody, whatever the scores."""

    name: str
    max_endpoints: int = 1

    def pick(self, context: ScheduleContext, scores: Sequence[float]) -> Sequence[int]:
        return context.rng.sample(range(len(scores)), min(self.max_endpoints, len(scores)))


def _builder(make: Callable[[str, int], object]) -> Callable[[str, PickerParameters, Inputs], object]:
    return lambda name, parameters, _inputs: make(name, parameters.max_num_of_endpoints)


ROWS = (
    PluginType("max-score-picker", Kind.PICKER, PickerParameters, _builder(MaxScorePicker)),
    PluginType("weighted-random-picker", Kind.PICKER, PickerParameters, _builder(WeightedRandomPicker)),
    PluginType("random-picker", Kind.PICKER, PickerParameters, _builder(RandomPicker)),
)
