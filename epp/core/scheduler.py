"""One scheduling profile: filters, then weighted scorers, then one picker. Pure.

Scores are columns, not objects: a thousand candidates cost a few passes over lists, and only the few
rows that somebody will look at are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epp.core.columns import add_weighted, largest
from epp.core.errors import NoEndpoints
from epp.core.plugin import Filter, Picker, Scorer
from epp.core.types import MAX_RECORDED, Candidate, ScheduleContext, ScoredCandidate


@dataclass(frozen=True, slots=True)
class Profile:
    """A named pipeline. `scorers` carry their weight."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The picked candidates (winner first) and the `MAX_RECORDED` best that were scored (best first;
    the winner is always among them)."""

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
    table = _score(profile, context, kept)
    order = profile.picker.pick(context, table.totals)
    best = _best(table.totals, order[0])
    return ProfileResult(tuple(map(table.row, order)), tuple(map(table.row, best)))


def _best(totals: list[float], winner: int) -> list[int]:
    """Indices of the `MAX_RECORDED` best, best first, the winner among them."""
    best = largest(totals, MAX_RECORDED)
    if winner not in best:
        best[-1] = winner
    return best


@dataclass(frozen=True, slots=True)
class _ScoreTable:
    candidates: Sequence[Candidate]
    names: list[str]  # of the scorers
    columns: list[Sequence[float]]  # by scorer
    totals: list[float]

    def row(self, index: int) -> ScoredCandidate:
        parts = zip(self.names, [scores[index] for scores in self.columns], strict=True)
        return ScoredCandidate(self.candidates[index], self.totals[index], tuple(parts))


def _score(profile: Profile, context: ScheduleContext, candidates: Sequence[Candidate]) -> _ScoreTable:
    columns: list[Sequence[float]] = []
    totals = [0.0] * len(candidates)
    for scorer, weight in profile.scorers:
        scores, totals = add_weighted(totals, scorer.score(context, candidates), weight)
        columns.append(scores)
    return _ScoreTable(candidates, [scorer.name for scorer, _ in profile.scorers], columns, totals)
