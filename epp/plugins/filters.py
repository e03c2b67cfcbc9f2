"""Filters by role, label and load: which candidates may serve at all. Semantics: llm-d-router at ebab687;
what unknown means: `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from epp.core.thresholds import ROLE_LABEL
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import LOAD_NEED, METRICS_NEED, Inputs, Kind, Need, PluginType, plain
from epp.plugins.unknown import mean_of_known

DECODE_ROLES = frozenset({"decode", "prefill-decode", "encode-prefill-decode", "both"})
PREFILL_ROLES = frozenset({"prefill", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both"})
ENCODE_ROLES = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """Keep endpoints whose role label is one of `roles`; `keep_unlabelled` as in the reference:
    an endpoint without a role may decode but is never a prefill worker."""

    name: str
    roles: frozenset[str]
    keep_unlabelled: bool

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if self._keeps(c.endpoint.labels.get(ROLE_LABEL))]

    def _keeps(self, role: str | None) -> bool:
        return self.keep_unlabelled if role is None else role in self.roles


def decode_filter(name: str) -> RoleFilter:
    return RoleFilter(name, DECODE_ROLES, keep_unlabelled=True)


def prefill_filter(name: str) -> RoleFilter:
    return RoleFilter(name, PREFILL_ROLES, keep_unlabelled=False)


def encode_filter(name: str) -> RoleFilter:
    return RoleFilter(name, ENCODE_ROLES, keep_unlabelled=False)


class LabelRequirement(Parameters):
    """One term of a Kubernetes label selector."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _values(self) -> LabelRequirement:
        if self.operator in ("In", "NotIn"):
            if not self.values:
                raise ValueError(f"{self.operator} needs values")
        elif self.values:
            raise ValueError(f"{self.operator} takes no values")
        return self

    def matches(self, labels: Mapping[str, str]) -> bool:
        """An absent label matches NotIn and DoesNotExist, as in Kubernetes."""
        if self.operator == "Exists":
            return self.key in labels
        if self.operator == "DoesNotExist":
            return self.key not in labels
        inside = self.key in labels and labels[self.key] in self.values
        return inside if self.operator == "In" else not inside


class LabelSelectorParameters(Parameters):
    match_labels: dict[str, str] = Field(default_factory=dict)
    match_expressions: list[LabelRequirement] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LabelSelectorFilter:
    """Keep endpoints that match every term; no term: everybody."""

    name: str
    match_labels: Mapping[str, str]
    match_expressions: tuple[LabelRequirement, ...] = ()

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if self._keeps(c.endpoint.labels)]

    def _keeps(self, labels: Mapping[str, str]) -> bool:
        equal = all(labels.get(name) == value for name, value in self.match_labels.items())
        return equal and all(term.matches(labels) for term in self.match_expressions)


Metric = Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
_READ: Mapping[str, Callable[[Candidate], float | None]] = {
    "active-requests": lambda c: c.load.requests,
    "running-requests": lambda c: c.metrics.running_requests,
    "waiting-queue": lambda c: c.metrics.waiting_requests,
    "kv-cache-utilization": lambda c: c.metrics.kv_usage,
}


class UtilizationCondition(Parameters):
    metric: Metric
    max_value: float = Field(ge=0.0, allow_inf_nan=False)


class UtilizationFilterParameters(Parameters):
    conditions: list[UtilizationCondition] = Field(min_length=1)
    fallback_on_empty: bool = False
    in_flight_load_producer_name: str | None = None

    def reads(self, *, own: bool) -> bool:
        """Whether a condition is about what this picker counts itself, or about what engines report."""
        return any((condition.metric == "active-requests") is own for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class UtilizationFilter:
    """Drop endpoints of which one metric is above its `maxValue`. Unknown counts as the mean of the known
    ones, so a pool that is overloaded as a whole does not send everything where nothing is known."""

    name: str
    conditions: tuple[tuple[str, float], ...]
    fallback_on_empty: bool = False

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        kept = candidates
        for metric, most in self.conditions:
            values = list(map(_READ[metric], candidates))
            mean = mean_of_known(values)
            if mean is None:
                continue
            over = {
                c.endpoint.id
                for c, value in zip(candidates, values, strict=True)
                if (mean if value is None else value) > most
            }
            kept = [c for c in kept if c.endpoint.id not in over] if over else kept
        return candidates if not kept and self.fallback_on_empty else kept


def _selector(name: str, p: LabelSelectorParameters, _inputs: Inputs) -> object:
    return LabelSelectorFilter(name, p.match_labels, tuple(p.match_expressions))


def _utilization(name: str, p: UtilizationFilterParameters, _inputs: Inputs) -> object:
    conditions = tuple((condition.metric, condition.max_value) for condition in p.conditions)
    return UtilizationFilter(name, conditions, p.fallback_on_empty)


ROWS = (
    PluginType("decode-filter", Kind.FILTER, build=plain(decode_filter)),
    PluginType("prefill-filter", Kind.FILTER, build=plain(prefill_filter)),
    PluginType("encode-filter", Kind.FILTER, build=plain(encode_filter)),
    PluginType("label-selector-filter", Kind.FILTER, LabelSelectorParameters, _selector),
    PluginType(
        "utilization-filter",
        Kind.FILTER,
        UtilizationFilterParameters,
        _utilization,
        (
            Need(METRICS_NEED.data, when=lambda p: p.reads(own=False)),
            Need(LOAD_NEED.data, LOAD_NEED.parameter, lambda p: p.reads(own=True)),
        ),
    ),
)
