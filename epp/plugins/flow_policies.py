"""Flow control's policies by name: who of those that wait is next. Semantics: llm-d-router at ebab687.

*Fairness* chooses a flow (requests with one fairness id) in a priority band, *ordering* chooses a request
in a flow. The policies themselves are `epp.core.flow`; here is what configurations call them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from epp.core.flow.bands import Fairness, Ordering
from epp.core.flow.usage_limits import (
    HoldbackByRank,
    HoldbackByTable,
    HoldbackByValue,
    SoftReflectiveCeiling,
    UsageLimit,
)
from epp.plugins.parameters import Parameters, Share
from epp.plugins.plugin_type import Inputs, Kind, PluginType, plain

DEFAULT_FAIRNESS = Fairness.GLOBAL_STRICT.value
DEFAULT_ORDERING = Ordering.FCFS.value


class ProgramAwareParameters(Parameters):
    """Least attained service: tokens served (output counts twice), against the wait of the next request."""

    strategy: Literal["las"] = "las"
    las_weight_service: float = Field(default=0.8, ge=0.0, le=1e6)
    las_weight_head_wait: float = Field(default=0.2, ge=0.0, le=1e6)
    las_half_life_seconds: float = Field(default=60.0, ge=0.0, le=86_400.0)  # 0: nothing is forgotten
    eviction_ttl_seconds: float = Field(default=3600.0, ge=0.0)
    eviction_sweep_seconds: float = Field(default=300.0, gt=0.0)


class StaticUsageLimitParameters(Parameters):
    threshold: float = Field(default=1.0, gt=0.0, le=1_000.0)  # saturation up to which requests are sent


def _priority(value: object) -> object:
    """Keys of a JSON object are texts."""
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("expected a priority, a whole number") from None


_Priority = Annotated[int, BeforeValidator(_priority)]


class PriorityHoldbackParameters(Parameters):
    shape: Literal["linear"] | None = None  # linear where there is a shape
    domain: Literal["rank", "value", "explicit"] = "rank"  # steps by rank, by value, or `ceilings`
    min_ceiling: float | None = Field(default=None, ge=0.0, lt=1.0)  # of the lowest priority; required
    max_ceiling: float | None = Field(default=None, gt=0.0, le=1.0)  # of the highest; 1.0
    ceilings: dict[_Priority, Share] | None = None  # by priority, with domain explicit only

    @model_validator(mode="after")
    def _fits_its_domain(self) -> Self:
        if self.domain == "explicit":
            self._check_table()
        elif self.ceilings is not None:
            raise ValueError("ceilings is for domain explicit only")
        elif self.min_ceiling is None:
            raise ValueError("minCeiling is required: how early the lowest priority waits")
        elif self.min_ceiling >= self.highest:
            raise ValueError("minCeiling must be below maxCeiling")
        return self

    def _check_table(self) -> None:
        if not self.ceilings:
            raise ValueError("domain explicit needs ceilings")
        if self.shape is not None or self.min_ceiling is not None or self.max_ceiling is not None:
            raise ValueError("shape, minCeiling and maxCeiling are not for domain explicit")
        falling = [ceiling for _, ceiling in sorted(self.ceilings.items(), reverse=True)]
        if falling != sorted(falling, reverse=True):
            raise ValueError("ceilings must not rise from a higher priority to a lower one")

    @property
    def highest(self) -> float:
        return 1.0 if self.max_ceiling is None else self.max_ceiling


def _holdback(_name: str, p: PriorityHoldbackParameters, _inputs: Inputs) -> UsageLimit:
    if p.domain == "explicit":
        return HoldbackByTable(p.ceilings or {})
    by = HoldbackByRank if p.domain == "rank" else HoldbackByValue
    return by(p.min_ceiling or 0.0, p.highest)


def _soft(_name: str) -> UsageLimit:
    return SoftReflectiveCeiling()


ROWS = (
    PluginType(Fairness.GLOBAL_STRICT.value, Kind.FAIRNESS),
    PluginType(Fairness.ROUND_ROBIN.value, Kind.FAIRNESS),
    PluginType(
        Fairness.PROGRAM_AWARE.value,
        Kind.FAIRNESS,
        ProgramAwareParameters,
        ignored=dict.fromkeys(
            ("eviction_ttl_seconds", "eviction_sweep_seconds"),
            "of 10,000 flows the one that was served longest ago is forgotten",
        ),
    ),
    PluginType(Ordering.FCFS.value, Kind.ORDERING),
    PluginType(Ordering.EDF.value, Kind.ORDERING),
    PluginType(Ordering.SLO_DEADLINE.value, Kind.ORDERING),
    PluginType("static-usage-limit-policy", Kind.USAGE_LIMIT, StaticUsageLimitParameters),
    PluginType("priority-holdback-policy", Kind.USAGE_LIMIT, PriorityHoldbackParameters, _holdback),
    PluginType("soft-reflective-ceiling-policy", Kind.USAGE_LIMIT, build=plain(_soft)),
)
