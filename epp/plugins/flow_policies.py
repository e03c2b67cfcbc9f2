"""Flow control's policies by name: who of those that wait is next. Semantics: llm-d-router at ebab687.

*Fairness* chooses a flow (requests with one fairness id) in a priority band, *ordering* chooses a request
in a flow. The policies themselves are `epp.core.flow`; here is what configurations call them.
"""

from __future__ import annotations

from pydantic import Field

from epp.core.flow.bands import Fairness, Ordering
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import Kind, PluginType

DEFAULT_FAIRNESS = Fairness.GLOBAL_STRICT.value
DEFAULT_ORDERING = Ordering.FCFS.value


class ProgramAwareParameters(Parameters):
    las_half_life_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0)


class StaticUsageLimitParameters(Parameters):
    threshold: float = Field(default=1.0, gt=0.0, le=1_000.0)  # saturation up to which requests are sent


ROWS = (
    PluginType(Fairness.GLOBAL_STRICT.value, Kind.FAIRNESS),
    PluginType(Fairness.ROUND_ROBIN.value, Kind.FAIRNESS),
    PluginType(Fairness.PROGRAM_AWARE.value, Kind.FAIRNESS, ProgramAwareParameters),
    PluginType(Ordering.FCFS.value, Kind.ORDERING),
    PluginType(Ordering.EDF.value, Kind.ORDERING),
    PluginType(Ordering.SLO_DEADLINE.value, Kind.ORDERING),
    PluginType("static-usage-limit-policy", Kind.USAGE_LIMIT, StaticUsageLimitParameters),
)
