"""Pull thresholds in force: one immutable value, swapped whole.

Precedence (mission, "The behaviour that defines it", 3): pulls exist only where
`p2p-source-producer` is configured; a PullThresholds document overrides the producer's
`minCachedTokenDelta`; with neither value set no source is ever named, and the picker says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullThresholds:
    """What a PullThresholds document says. None: the document does not set it."""

    enabled: bool | None = None
    min_cached_token_delta: int | None = None
    require_verified: bool | None = None


NO_THRESHOLDS = PullThresholds()


@dataclass(frozen=True, slots=True)
class SourcePolicy:
    """The source rule's parameters as they apply to the next decision."""

    configured: bool
    enabled: bool = True
    min_cached_token_delta: int | None = None
    require_verified: bool = False

    @property
    def active(self) -> bool:
        return self.configured and self.enabled and self.min_cached_token_delta is not None


def effective_policy(
    producer_delta: int | None, *, configured: bool, thresholds: PullThresholds
) -> SourcePolicy:
    """Lay `thresholds` over the producer's own value."""
    delta = thresholds.min_cached_token_delta
    return SourcePolicy(
        configured=configured,
        enabled=thresholds.enabled is not False,
        min_cached_token_delta=delta if delta is not None else producer_delta,
        require_verified=bool(thresholds.require_verified),
    )
