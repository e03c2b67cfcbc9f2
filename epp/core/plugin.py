"""Protocols of scheduling plugins. Plugins are pure: they see values and return values.

A plugin instance has a `name` (its configured name, else its type). Scores are in [0, 1]. All of them
see every candidate at once and answer with one list, so that a thousand endpoints cost one call. What an
unknown input means is one rule for all of them: `epp.plugins.unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from engine_plugin.identity import EndpointId
from epp.core.types import Candidate, ScheduleContext


class Plugin(Protocol):
    @property
    def name(self) -> str: ...


class Filter(Plugin, Protocol):
    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]: ...


class Scorer(Plugin, Protocol):
    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        """One score a candidate, in their order. Called once a profile."""
        ...


class Picker(Plugin, Protocol):
    def pick(self, context: ScheduleContext, scores: Sequence[float]) -> Sequence[int]:
        """Indices into `scores` (weighted sums): the winner first, then fallbacks; never empty for a
        non-empty input."""
        ...


class PrefillDecider(Plugin, Protocol):
    def wants_prefill(self, context: ScheduleContext, decode: Candidate) -> bool:
        """Whether to disaggregate this request, given the decode endpoint picked for it."""
        ...


class SaturationDetector(Plugin, Protocol):
    def saturation(self, candidates: Sequence[Candidate], now_s: float, unbooked: int = 0) -> float:
        """How full the pool is: 1.0 and more means that nothing should be sent. `unbooked` requests have
        been let through and are on nobody's books yet."""
        ...


@runtime_checkable
class Follower(Protocol):
    """A plugin that remembers where requests went. Its memory is bounded and belongs to the picker's
    thread."""

    def placed(
        self, context: ScheduleContext, candidates: Sequence[Candidate], targets: Mapping[str, Candidate]
    ) -> Mapping[str, str]:
        """`targets`: profile name -> winner, the primary profile first. Returns headers for the client."""
        ...


@runtime_checkable
class SourceChooser(Protocol):
    """A plugin that places a request with a certain source in mind. It needs an outlook."""

    def intended_source(self, context: ScheduleContext, computing: Candidate) -> EndpointId | None:
        """The only one that may then be named for `computing`, if the rule names any; None: no wish."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A plugin that reads `ScheduleContext.outlook`; without one in use none is made."""

    @property
    def looks_ahead(self) -> bool: ...


@runtime_checkable
class HeaderReader(Protocol):
    """A plugin that reads request headers; nothing else of them reaches the core."""

    @property
    def header_names(self) -> frozenset[str]:
        """In lower case."""
        ...
