"""`kvpull-second-copy-filter` (experimental): a hot prefix gets another holder before its holders drown.

Mooncake's rule, in this product's terms (its Conductor sends a request away from the best match and moves
the blocks along, where waiting there costs more than the move, so that hot prefixes replicate by themselves):
when a prompt's head is hot, everybody who holds it is busier than somebody else by a ratio, and there are
few copies yet, only endpoints without a copy are kept that the source rule would let pull one. The pull makes
the copy. Otherwise everybody is kept. It forgets heads by age; it holds digests, never tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pydantic import Field

from engine_plugin.identity import EndpointId
from epp.core.hot_prefixes import MAX_HEADS, HotPrefixes
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import MAX_TOKENS, DurationS, Parameters
from epp.plugins.plugin_type import LOAD_NEED, PREFIX_NEED, Inputs, Kind, Need, PluginType


class SecondCopyParameters(Parameters):
    head_tokens: int = Field(
        default=1_024, ge=16, le=MAX_TOKENS
    )  # what two prompts must share to be one prefix
    hot_requests: float = Field(default=4.0, gt=0.0, le=1e9, allow_inf_nan=False)  # within about `window`
    window: DurationS = Field(default=30.0, gt=0.0, le=86_400.0)  # written "30s"
    overload_ratio: float = Field(default=2.0, ge=1.0, le=1e6, allow_inf_nan=False)
    max_copies: int = Field(default=2, ge=2, le=1_024)  # holders of one prefix, those on their way included
    prefix_match_info_producer_name: str | None = None
    in_flight_load_producer_name: str | None = None


class SecondCopyFilter:
    """Owned by the picker, on its thread."""

    def __init__(self, name: str, parameters: SecondCopyParameters) -> None:
        self.name = name
        self._parameters = parameters
        self._prefixes = HotPrefixes(parameters.head_tokens, parameters.window)
        self._ordered: OrderedDict[bytes, dict[EndpointId, float]] = OrderedDict()  # copies on their way

    @property
    def looks_ahead(self) -> bool:
        return True

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        head = self._prefixes.head_of(context.request)
        if head is None or len(candidates) < 2:
            return candidates
        if self._prefixes.heat(head, context.now_s) < self._parameters.hot_requests:
            return candidates
        holders, others = self._split(head, candidates, context.now_s)
        if not holders or len(holders) >= self._parameters.max_copies:
            return candidates
        idle = min(map(_busy, holders)) / self._parameters.overload_ratio
        free = [row for row in others if _busy(row) <= idle]
        return self._that_would_pull(context, free) or candidates

    def placed(
        self, context: ScheduleContext, candidates: Sequence[Candidate], targets: Mapping[str, Candidate]
    ) -> Mapping[str, str]:
        """Counts the request, and the copy that it is going to make."""
        head = self._prefixes.head_of(context.request)
        if head is None:
            return {}
        self._prefixes.add(head, context.now_s)
        ordered = self._ordered.setdefault(head, {})
        self._ordered.move_to_end(head)
        while len(self._ordered) > MAX_HEADS:
            self._ordered.popitem(last=False)
        for endpoint, at_s in list(ordered.items()):
            if context.now_s - at_s > self._parameters.window:
                del ordered[endpoint]
        for row in targets.values():
            ordered[row.endpoint.id] = context.now_s
        return {}

    def _split(
        self, head: bytes, candidates: Sequence[Candidate], now_s: float
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Those that hold the head or were just sent it, and the others whose cache is known."""
        ordered, window_s = self._ordered.get(head, {}), self._parameters.window
        holders: list[Candidate] = []
        others: list[Candidate] = []
        for row in candidates:
            sent_s = ordered.get(row.endpoint.id)
            expected = sent_s is not None and now_s - sent_s <= window_s
            if expected or row.match.expected_tokens >= self._parameters.head_tokens:
                holders.append(row)
            elif row.match.state.has_claim:
                others.append(row)
        return holders, others

    @staticmethod
    def _that_would_pull(context: ScheduleContext, rows: Sequence[Candidate]) -> Sequence[Candidate]:
        """A copy that has to be computed is no gain over waiting."""
        outlook = context.outlook
        if outlook is None:
            return ()
        return [row for row in rows if outlook.source_for(row) is not None]


def _busy(row: Candidate) -> float:
    """Requests there, this one included: our own and what the engine says, whichever is more."""
    told = (row.metrics.waiting_requests or 0.0) + (row.metrics.running_requests or 0.0)
    return 1.0 + max(told, float(row.load.requests))


def _build(name: str, parameters: SecondCopyParameters, _inputs: Inputs) -> object:
    return SecondCopyFilter(name, parameters)


ROWS = (
    PluginType(
        "kvpull-second-copy-filter",
        Kind.FILTER,
        SecondCopyParameters,
        _build,
        (PREFIX_NEED, Need(LOAD_NEED.data, LOAD_NEED.parameter)),
        experimental=True,
    ),
)
