"""One scheduling profile: filters, then weighted scorers, then one picker. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from epp.core.errors import NoEndpoints
from epp.core.plugin import Filter, Picker, Scorer
from epp.core.types import Candidate, ScheduleContext, ScoredCandidate


@dataclass(frozen=True, slots=True)
class Profile:
    """A named pipeline. `scorers` carry their weight."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The picked candidates (winner first) and everybody who was scored (best first)."""

    picked: tuple[ScoredCandidate, ...]
    scored: tuple[ScoredCandidate, ...]

    @property
    def winner(self) -> Candidate:
        return self.picked[0].candidate


def run_profile(profile: Profile, context: ScheduleContext, candidates: Sequence[Candidate]) -> ProfileResult:
    """Run `profile` over `candidates`.

    Raises:
        NoEndpoints: a filter left nobody; the message names it.
    """
    kept = candidates
    for plugin in profile.filters:
        kept = plugin.filter(context, kept)
        if not kept:
            raise NoEndpoints(f"profile {profile.name}: {plugin.name} left no endpoint")
    if not kept:
        raise NoEndpoints(f"profile {profile.name}: no endpoint")
    scored = _score(profile, context, kept)
    picked = tuple(profile.picker.pick(context, scored))
    return ProfileResult(picked, tuple(sorted(scored, key=lambda s: -s.score)))


def _score(
    profile: Profile, context: ScheduleContext, candidates: Sequence[Candidate]
) -> list[ScoredCandidate]:
    totals = [0.0] * len(candidates)
    parts: list[list[tuple[str, float]]] = [[] for _ in candidates]
    for scorer, weight in profile.scorers:
        for i, raw in enumerate(scorer.score(context, candidates)):
            value = min(1.0, max(0.0, raw)) if math.isfinite(raw) else 0.0
            totals[i] += weight * value
            parts[i].append((scorer.name, value))
    return [ScoredCandidate(candidate, totals[i], tuple(parts[i])) for i, candidate in enumerate(candidates)]
