"""Up to which saturation each priority is served: the ceilings of flow control's usage limit policies. Pure.

Semantics: llm-d-router `priority-holdback-policy` and `soft-reflective-ceiling-policy`. A priority whose
ceiling is reached waits; nothing of it is refused for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

_ALMOST_NOTHING: Final = 1e-9  # saturation just below 1: the period stays finite
_FORGET_S: Final = 600.0  # a priority without a band of its own counts for so long after its last request


class UsageLimit(Protocol):
    """One for all priorities."""

    def ceilings(self, saturation: float, priorities: Sequence[int], turn: int) -> list[float]:
        """Of each of `priorities` (highest first): it is served while `saturation` is below. `turn` counts
        the occasions on which somebody could have been served."""
        ...


@dataclass(frozen=True, slots=True)
class HoldbackByRank:
    """From `highest` for the highest priority down to `lowest`, in equal steps."""

    lowest: float
    highest: float = 1.0

    def ceilings(self, saturation: float, priorities: Sequence[int], turn: int) -> list[float]:
        step = (self.highest - self.lowest) / max(len(priorities) - 1, 1)
        return [self.highest - rank * step for rank in range(len(priorities))]


@dataclass(frozen=True, slots=True)
class HoldbackByValue:
    """From `highest` down to `lowest`, by how far a priority lies below the highest one."""

    lowest: float
    highest: float = 1.0

    def ceilings(self, saturation: float, priorities: Sequence[int], turn: int) -> list[float]:
        spread = priorities[0] - priorities[-1] if priorities else 0
        if not spread:
            return [self.highest] * len(priorities)
        share = (self.highest - self.lowest) / spread
        return [self.lowest + (priority - priorities[-1]) * share for priority in priorities]


@dataclass(frozen=True, slots=True)
class HoldbackByTable:
    """As written down; a priority that is not in the table is not served."""

    table: Mapping[int, float]

    def ceilings(self, saturation: float, priorities: Sequence[int], turn: int) -> list[float]:
        return [self.table.get(priority, 0.0) for priority in priorities]


@dataclass(frozen=True, slots=True)
class SoftReflectiveCeiling:
    """The highest priority is always served. The one at rank i of N freely below 1 - i * saturation/(N - 1),
    and above that in one turn of saturation/(1 - saturation): ever more seldom, and never from 1 on."""

    def ceilings(self, saturation: float, priorities: Sequence[int], turn: int) -> list[float]:
        lower = max(len(priorities) - 1, 1)
        return [self._ceiling(saturation, rank / lower, turn) for rank in range(len(priorities))]

    def _ceiling(self, saturation: float, depth: float, turn: int) -> float:
        if depth == 0.0 or saturation < 1.0 - depth * saturation:
            return 1.0
        if saturation >= 1.0:
            return 0.0
        period = max(1, round(saturation / (1.0 - saturation + _ALMOST_NOTHING)))
        return 1.0 if turn % period == 0 else 0.0


@dataclass(slots=True)
class ActivePriorities:
    """Those with a band in the configuration, and those that were asked for lately."""

    configured: frozenset[int] = frozenset()
    _last_s: dict[int, float] = field(default_factory=dict)

    def note(self, priority: int, now_s: float) -> None:
        """Mutates: somebody asks with this priority."""
        if priority not in self.configured:
            self._last_s[priority] = now_s

    def descending(self, now_s: float) -> list[int]:
        """Mutates: forgets those that nobody has asked for in ten minutes."""
        for priority in [p for p, last_s in self._last_s.items() if last_s < now_s - _FORGET_S]:
            del self._last_s[priority]
        return sorted({*self.configured, *self._last_s}, reverse=True)
