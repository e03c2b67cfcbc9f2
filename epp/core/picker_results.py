"""What a picker hands out: a decision put together, and one endpoint as it is seen now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from epp.core.disagg import Placement
from epp.core.outlook import Outlook
from epp.core.types import Candidate, SchedulingDecision, SchedulingRequest, SourceChoice


@dataclass(frozen=True, slots=True)
class EndpointSnapshot:
    """One endpoint as the picker sees it now, for debug surfaces and gauges."""

    candidate: Candidate
    incompatible_with: Mapping[str, str]  # other endpoint -> first differing field


def make_decision(
    decision_id: str,
    request: SchedulingRequest,
    placement: Placement,
    computing: Candidate,
    choice: SourceChoice,
    refused_peers: frozenset[str],
    headers: tuple[tuple[str, str], ...],
    outlook: Outlook | None = None,
) -> SchedulingDecision:
    winner, *rest = placement.primary.picked
    shown = [*placement.primary.scored, *(placement.prefill.scored if placement.prefill else ())]
    found = outlook.found if outlook is not None else {}
    ids = (row.candidate.endpoint.id for row in shown) if found else ()
    return SchedulingDecision(
        decision_id=decision_id,
        request_id=request.request_id,
        destination=winner.candidate.endpoint,
        fallbacks=tuple(s.candidate.endpoint for s in rest),
        prefill=placement.prefill.winner.endpoint if placement.prefill else None,
        choice=choice,
        scored=placement.primary.scored,
        computing=computing.endpoint.id,
        computing_cached_tokens=computing.match.cached_tokens,
        model=request.model,
        prompt_tokens=None if request.token_ids is None else request.prompt_tokens,
        computed_by=computing,
        refused_peers=refused_peers,
        prefill_missing=placement.prefill_missing,
        response_headers=headers,
        forecasts={endpoint: found[endpoint] for endpoint in ids if endpoint in found},
    )


def snapshots(rows: list[Candidate]) -> tuple[EndpointSnapshot, ...]:
    """Every row with its compatibility with the others."""
    return tuple(EndpointSnapshot(row, _incompatible(row, rows)) for row in rows)


def _incompatible(row: Candidate, rows: Iterable[Candidate]) -> dict[str, str]:
    found: dict[str, str] = {}
    if row.metrics.info is None:
        return found
    for other in rows:
        if other.endpoint.id != row.endpoint.id and other.metrics.info is not None:
            field = row.metrics.info.mismatch(other.metrics.info)
            if field is not None:
                found[str(other.endpoint.id)] = field
    return found
