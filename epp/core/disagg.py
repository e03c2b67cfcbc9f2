"""Profile handlers: which profiles run for a request, and which result means what. Pure.

Semantics: llm-d-router `single-profile-handler` and `disagg-profile-handler` (decode-first) at
ebab687. Under disaggregation the decode endpoint is the destination and the prefill endpoint is
where the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epp.core.plugin import PrefillDecider
from epp.core.scheduler import Profile, ProfileResult, run_profile
from epp.core.types import Candidate, ScheduleContext


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: the primary profile's result, and the prefill profile's where it ran."""

    primary: ProfileResult
    prefill: ProfileResult | None = None

    @property
    def computing(self) -> Candidate:
        return (self.prefill or self.primary).winner


class ProfileHandler(Protocol):
    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        """Raises NoEndpoints when the primary profile finds nobody."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProfileHandler:
    """Exactly one profile; its winner serves and computes."""

    profile: Profile

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        return Placement(run_profile(self.profile, context, candidates))


@dataclass(frozen=True, slots=True)
class DisaggProfileHandler:
    """Decode first; then, if the decider says so, a prefill endpoint for the same request.

    A prefill winner equal to the decode winner (one pod with both roles) means no split.
    """

    decode: Profile
    prefill: Profile
    decider: PrefillDecider

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        primary = run_profile(self.decode, context, candidates)
        if not self.decider.wants_prefill(context, primary.winner):
            return Placement(primary)
        prefill = run_profile(self.prefill, context, candidates)
        if prefill.winner.endpoint.id == primary.winner.endpoint.id:
            return Placement(primary)
        return Placement(primary, prefill)
