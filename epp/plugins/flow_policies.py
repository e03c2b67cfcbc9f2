"""Flow control's policies: who of those that wait is next. Semantics: llm-d-router at ebab687.

*Fairness* chooses a flow (requests with one fairness id) in a priority band, *ordering* chooses a request
in a flow. The queues themselves are `epp.core.flow_queue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pydantic import Field

from epp.core.flow_queue import FlowHead, OrderingKey, Waiting
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import Inputs, Kind, PluginType, plain

INPUT_TOKEN_COST, OUTPUT_TOKEN_COST = 1.0, 2.0
MAX_PROGRAMS = 1 << 14


class GlobalStrictFairness:
    """None: the request that is first by its ordering, whatever its flow."""

    def __init__(self, name: str) -> None:
        self.name = name

    def choose(self, heads: Sequence[FlowHead], now_s: float) -> FlowHead:
        return min(heads, key=lambda head: head.order)

    def served(self, flow: str, prompt_tokens: int, output_tokens: int, now_s: float) -> None: ...


class RoundRobinFairness:
    """Flows take turns, in the order of their ids."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: dict[int, str] = {}  # by band

    def choose(self, heads: Sequence[FlowHead], now_s: float) -> FlowHead:
        band = heads[0].waiting.priority
        last = self._last.get(band, "")
        turn = min(heads, key=lambda head: (head.flow <= last, head.flow))
        self._last[band] = turn.flow
        return turn

    def served(self, flow: str, prompt_tokens: int, output_tokens: int, now_s: float) -> None: ...


class ProgramAwareParameters(Parameters):
    las_half_life_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0)


class ProgramAwareFairness:
    """The flow that has had the least service: tokens, output twice as dear, halved every half-life. At
    most `MAX_PROGRAMS` flows are remembered; the one with the least service goes first."""

    def __init__(self, name: str, half_life_s: float = 60.0) -> None:
        self.name = name
        self._half_life_s = half_life_s
        self._service: dict[str, tuple[float, float]] = {}  # flow -> (service, as of)

    def choose(self, heads: Sequence[FlowHead], now_s: float) -> FlowHead:
        return min(heads, key=lambda head: (self.service(head.flow, now_s), head.order))

    def service(self, flow: str, now_s: float) -> float:
        """Weighted tokens, decayed to now."""
        attained, at_s = self._service.get(flow, (0.0, now_s))
        return attained * math.exp2(-max(0.0, now_s - at_s) / self._half_life_s)

    def served(self, flow: str, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        cost = INPUT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        self._service[flow] = (self.service(flow, now_s) + cost, now_s)
        if len(self._service) > MAX_PROGRAMS:
            least = min(self._service, key=lambda flow: self.service(flow, now_s))
            del self._service[least]


def _by_arrival(waiting: Waiting) -> OrderingKey:
    return (waiting.arrived_s, waiting.number)


def _by_deadline(waiting: Waiting) -> OrderingKey:
    return (waiting.expires_at_s, waiting.number)


def _by_slo(waiting: Waiting) -> OrderingKey:
    """No objective: after all that have one."""
    slo_s = waiting.slo_ttft_s
    return (math.inf if slo_s is None else waiting.arrived_s + slo_s, waiting.number)


class Ordering:
    """`key` of a request: the smallest is first."""

    def __init__(self, name: str, key: Callable[[Waiting], OrderingKey]) -> None:
        self.name = name
        self.key = key


def _program_aware(name: str, p: ProgramAwareParameters, _inputs: Inputs) -> object:
    return ProgramAwareFairness(name, p.las_half_life_seconds)


class StaticUsageLimitParameters(Parameters):
    threshold: float = Field(default=1.0, gt=0.0, le=1_000.0)  # saturation up to which requests are sent


ROWS = (
    PluginType("global-strict-fairness-policy", Kind.FAIRNESS, build=plain(GlobalStrictFairness)),
    PluginType("round-robin-fairness-policy", Kind.FAIRNESS, build=plain(RoundRobinFairness)),
    PluginType("program-aware-fairness", Kind.FAIRNESS, ProgramAwareParameters, _program_aware),
    PluginType("fcfs-ordering-policy", Kind.ORDERING, build=plain(lambda name: Ordering(name, _by_arrival))),
    PluginType("edf-ordering-policy", Kind.ORDERING, build=plain(lambda name: Ordering(name, _by_deadline))),
    PluginType(
        "slo-deadline-ordering-policy", Kind.ORDERING, build=plain(lambda name: Ordering(name, _by_slo))
    ),
    PluginType("static-usage-limit-policy", Kind.USAGE_LIMIT, StaticUsageLimitParameters),
)
DEFAULT_FAIRNESS = "global-strict-fairness-policy"
DEFAULT_ORDERING = "fcfs-ordering-policy"
