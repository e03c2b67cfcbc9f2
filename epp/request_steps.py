"""A request on its way through the director, step by step: asked, counted, in flight. Values only, and the
one line that is logged of a decision.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from epp.core.types import SchedulingDecision, SchedulingRequest
from epp.extproc.events import RequestHead
from epp.extproc.wishes import Wishes
from epp.flow.admission import Asking
from epp.request.parse import ParsedRequest
from epp.telemetry.request_metrics import RequestNames, RequestSeries
from epp.telemetry.request_trace import RequestTrace

log = logging.getLogger("epp.director")


@dataclass(frozen=True, slots=True)
class InFlight:
    """What `first_token` and `finished` need to know of a decision."""

    decision_id: str
    decided_at_s: float
    asking: Asking
    prompt_tokens: int
    names: RequestNames
    series: RequestSeries
    trace: RequestTrace | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way through the director. `headers`: those that say how to read the body; `new_body`:
    what goes on in its place, without the headers in `removed`."""

    head: RequestHead = field(repr=False)
    body: bytes = field(repr=False)
    headers: Mapping[str, str]
    wishes: Wishes
    started_s: float
    trace: RequestTrace | None
    new_body: bytes | None = field(default=None, repr=False)
    rename_model: tuple[str, str] | None = None
    renamed_by: str = ""
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Counted:
    """A request that has been understood and is counted from now on."""

    asked: Asked
    parsed: ParsedRequest
    asking: Asking
    names: RequestNames
    series: RequestSeries


def log_decision(decision: SchedulingDecision, request: SchedulingRequest) -> None:
    """The one INFO line of a request: ids, addresses and counts."""
    source = decision.choice.source
    log.info(
        "request %s decision %s: %d tokens to %s%s, cached there %d, source %s (%s%s)",
        decision.request_id,
        decision.decision_id,
        request.prompt_tokens,
        decision.destination.id,
        f", prefill on {decision.prefill.id}" if decision.prefill else "",
        decision.computing_cached_tokens,
        source.endpoint.id if source else "none",
        decision.choice.reason.value,
        f", gain {source.gain_tokens}" if source else "",
    )
