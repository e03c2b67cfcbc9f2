"""Protocols of scheduling plugins. Plugins are pure: they see values and return values.

A plugin instance has a `name` (its configured name, else its type). Scores are in [0, 1]; unknown
metrics must be given the plugin's documented neutral value, never treated as idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from epp.core.types import Candidate, ScheduleContext, ScoredCandidate


class Plugin(Protocol):
    @property
    def name(self) -> str: ...


class Filter(Plugin, Protocol):
    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]: ...


class Scorer(Plugin, Protocol):
    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]: ...


class Picker(Plugin, Protocol):
    def pick(self, context: ScheduleContext, scored: Sequence[ScoredCandidate]) -> Sequence[ScoredCandidate]:
        """The winner first, then fallbacks; never empty for a non-empty input."""
        ...


class PrefillDecider(Plugin, Protocol):
    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        """Whether to disaggregate this request, given the decode endpoint picked for it."""
        ...
