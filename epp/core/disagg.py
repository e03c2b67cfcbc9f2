"""Profile handlers: which profiles run for a request, and which result means what. Pure.

Semantics: llm-d-router `single-profile-handler` and `disagg-profile-handler` (decode-first and
prefill-first) at ebab687. Under disaggregation the decode endpoint is the destination and the prefill
endpoint is where the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from epp.core.errors import NoEndpoints
from epp.core.plugin import PrefillDecider
from epp.core.scheduler import Profile, ProfileResult, run_profile
from epp.core.thresholds import ROLE_LABEL
from epp.core.types import Candidate, ScheduleContext


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: the primary profile's result, and the prefill profile's where it ran."""

    primary: ProfileResult
    prefill: ProfileResult | None = None
    names: tuple[str, str] = ("default", "prefill")  # of the two profiles
    prefill_missing: bool = False  # a prefill endpoint was wanted and there was none
    primary_port: int | None = None  # of every pod, for a gateway that knows no other; None: each rank's own

    @property
    def computing(self) -> Candidate:
        return (self.prefill or self.primary).winner

    @property
    def targets(self) -> dict[str, Candidate]:
        """Profile name -> winner, the primary profile first."""
        found = {self.names[0]: self.primary.winner}
        if self.prefill is not None:
            found[self.names[1]] = self.prefill.winner
        return found


def split_by_role(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Endpoints that prefill only, and endpoints that decode only or do both; the first is empty in a pool
    without roles."""
    prefill = [c for c in candidates if c.endpoint.labels.get(ROLE_LABEL) == "prefill"]
    return prefill, [c for c in candidates if c.endpoint.labels.get(ROLE_LABEL) != "prefill"]


class ProfileHandler(Protocol):
    @property
    def profiles(self) -> tuple[Profile, ...]:
        """All it may run, the primary one first."""
        ...

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        """Raises NoEndpoints when the primary profile finds nobody."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProfileHandler:
    """Exactly one profile; its winner serves and computes."""

    profile: Profile

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return (self.profile,)

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        return Placement(run_profile(self.profile, context, candidates), names=(self.profile.name, ""))


@dataclass(frozen=True, slots=True)
class DataParallelProfileHandler:
    """As `SingleProfileHandler`; the gateway sends everything to the pod's `primary_port`, and a header tells
    the sidecar there which rank is meant."""

    profile: Profile
    primary_port: int

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return (self.profile,)

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        result = run_profile(self.profile, context, candidates)
        return Placement(result, names=(self.profile.name, ""), primary_port=self.primary_port)


@dataclass(frozen=True, slots=True)
class DisaggProfileHandler:
    """Decode first: then, if `decider` says so, a prefill endpoint for the same request. Prefill first:
    always both, and the decode stage knows the prefill pick as its peer. `decider` None, decode first:
    never split.

    A prefill winner equal to the decode winner (one pod with both roles) means no split. Where a prefill
    endpoint is wanted and there is none, the request is refused, or decoded without (`may_decode_alone`;
    the placement says so).
    """

    decode: Profile
    prefill: Profile | None
    decider: PrefillDecider | None = None
    prefill_first: bool = False
    may_decode_alone: bool = False

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def _names(self) -> tuple[str, str]:
        return self.decode.name, self.prefill.name if self.prefill else ""

    def place(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Placement:
        if self.prefill_first:
            prefill = self._find_prefill(context, candidates)
            second = context if prefill is None else replace(context, peer=prefill.winner.endpoint)
            return self._joined(run_profile(self.decode, second, candidates), prefill)
        primary = run_profile(self.decode, context, candidates)
        if self.prefill is None or self.decider is None:
            return Placement(primary, names=self._names)
        if not self.decider.wants_prefill(context, primary.winner):
            return Placement(primary, names=self._names)
        second = replace(context, peer=primary.winner.endpoint)
        return self._joined(primary, self._find_prefill(second, candidates))

    def _find_prefill(
        self, context: ScheduleContext, candidates: Sequence[Candidate]
    ) -> ProfileResult | None:
        if self.prefill is None:
            return None
        try:
            return run_profile(self.prefill, context, candidates)
        except NoEndpoints:
            if not self.may_decode_alone:
                raise
            return None

    def _joined(self, primary: ProfileResult, prefill: ProfileResult | None) -> Placement:
        if prefill is None:
            return Placement(primary, None, self._names, prefill_missing=True)
        if prefill.winner.endpoint.id == primary.winner.endpoint.id:
            return Placement(primary, None, self._names)
        return Placement(primary, prefill, self._names)
