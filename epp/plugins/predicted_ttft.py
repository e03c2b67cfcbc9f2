"""`kvpull-predicted-ttft-scorer` (experimental): destination and source chosen together, by the predicted
time to the first token.

For every endpoint: the work ahead of it there, computing what it does not hold, or pulling it from the best
peer that the source rule would name for it, and what others run beside it (`epp.core.outlook`). Scores are
the soonest time over each one's, so that with `max-score-picker` and nothing else the soonest endpoint wins.
The source that it was won with is then the only one that may be named; the rule has the last word on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import LOAD_NEED, PREFIX_NEED, Inputs, Kind, Need, PluginType
from epp.plugins.unknown import fill_unknown


class PredictedTtftParameters(Parameters):
    """It has none of its own: costs come from PullThresholds (`cost`) and from what is learned."""

    prefix_match_info_producer_name: str | None = None
    in_flight_load_producer_name: str | None = None


@dataclass(frozen=True, slots=True)
class PredictedTtftScorer:
    """Unknown caches and costs take the mean of the known ones; where nothing is known, 0.5 for all."""

    name: str

    @property
    def looks_ahead(self) -> bool:
        return True

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        if context.outlook is None:
            return fill_unknown([None] * len(candidates))
        times_ms = [f.total_ms if f else None for f in context.outlook.forecasts(candidates)]
        soonest_ms = min((ms for ms in times_ms if ms is not None), default=0.0)
        # a millisecond on both sides: times of nothing have a ratio, too
        return fill_unknown([None if ms is None else (soonest_ms + 1.0) / (ms + 1.0) for ms in times_ms])

    def intended_source(self, context: ScheduleContext, computing: Candidate) -> EndpointId | None:
        found = context.outlook.forecast(computing) if context.outlook is not None else None
        return found.source if found is not None else None


def _build(name: str, _parameters: PredictedTtftParameters, _inputs: Inputs) -> object:
    return PredictedTtftScorer(name)


ROWS = (
    PluginType(
        "kvpull-predicted-ttft-scorer",
        Kind.SCORER,
        PredictedTtftParameters,
        _build,
        (PREFIX_NEED, Need(LOAD_NEED.data, LOAD_NEED.parameter)),
        experimental=True,
    ),
)
