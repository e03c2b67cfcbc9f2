"""Pull thresholds in force: immutable values, compiled once and swapped whole.

Precedence (mission, "The behaviour that defines it", 3): pulls exist only where
`p2p-source-producer` is configured; a PullThresholds document overrides the producer's
`minCachedTokenDelta`; with neither value set no source is ever named, and the picker says so.

Documents set values for a scope: all requests, one model, the role of the computing endpoint, the
class of the source, or any combination. Field by field the most specific scope that sets it wins; model
outranks role, role outranks source class. How documents are read and merged is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

ROLE_LABEL = "llm-d.ai/role"
SOURCE_CLASS_LABEL = "kvpull/source-class"  # of an endpoint, for example: same-rack, far

MODE_THRESHOLD = "threshold"
MODE_COST = "cost"


@dataclass(frozen=True, slots=True)
class PullSettings:
    """What documents say for one scope. None: they do not set it."""

    enabled: bool | None = None
    min_cached_token_delta: int | None = None
    require_verified: bool | None = None
    inflight_awareness: bool | None = None
    max_inflight_pulls: int | None = None  # served by one source at a time, all replicas together
    mode: str | None = None
    cost_margin_ms: float | None = None


SETTING_NAMES = tuple(f.name for f in fields(PullSettings))
NO_SETTINGS = PullSettings()


class Scope(NamedTuple):
    """Where settings apply; None: everywhere."""

    model: str | None = None
    role: str | None = None
    source_class: str | None = None

    def __str__(self) -> str:
        parts = zip(("model", "role", "sourceClass"), self, strict=True)
        return " ".join(f"{name}={value}" for name, value in parts if value is not None) or "default"


EVERYWHERE = Scope()


@dataclass(frozen=True, slots=True)
class PullThresholds:
    """All documents of one generation, merged: at most one `PullSettings` a scope."""

    rules: Mapping[Scope, PullSettings] = field(default_factory=dict)
    generation: int = 0

    def settings_for(self, scope: Scope) -> PullSettings:
        """Field by field the most specific rule that covers `scope`. At most eight look-ups."""
        found: dict[str, Any] = {}
        for mask in range(8):  # bit 2: model, bit 1: role, bit 0: source class
            wanted = (scope.model, scope.role, scope.source_class)
            if any(mask & bit and value is None for bit, value in zip((4, 2, 1), wanted, strict=True)):
                continue
            key = Scope(
                *(value if mask & bit else None for bit, value in zip((4, 2, 1), wanted, strict=True))
            )
            rule = self.rules.get(key)
            if rule is not None:
                found.update((n, v) for n in SETTING_NAMES if (v := getattr(rule, n)) is not None)
        return PullSettings(**found)


NO_THRESHOLDS = PullThresholds()


def everywhere(settings: PullSettings, generation: int = 0) -> PullThresholds:
    """Thresholds that make no difference between requests."""
    return PullThresholds({EVERYWHERE: settings}, generation)


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """Which part of an in-flight limit is this picker's: the shares of all replicas add up to the limit."""

    replicas: int = 1
    ordinal: int = 0  # 0 .. replicas-1

    def __post_init__(self) -> None:
        if not 0 <= self.ordinal < self.replicas:
            raise ValueError(f"replica {self.ordinal} of {self.replicas}")

    def of(self, limit: int) -> int:
        return limit // self.replicas + (self.ordinal < limit % self.replicas)


ALONE = ReplicaShare()


@dataclass(frozen=True, slots=True)
class SourcePolicy:
    """The source rule's parameters as they apply to one decision."""

    configured: bool
    enabled: bool = True
    min_cached_token_delta: int | None = None
    require_verified: bool = False
    inflight_awareness: bool = True
    max_inflight_pulls: int | None = None  # this replica's share; None: no limit
    mode: str = MODE_THRESHOLD
    cost_margin_ms: float = 0.0
    generation: int = 0
    by_class: Mapping[str, SourcePolicy] = field(default_factory=dict)  # where a class differs

    @property
    def active(self) -> bool:
        return self.configured and self.enabled and self.min_cached_token_delta is not None

    def of_class(self, source_class: str | None) -> SourcePolicy:
        """What applies to holders of that class."""
        return self if source_class is None else self.by_class.get(source_class, self)


class PolicyTable:
    """Thresholds laid over the producer's own value: `policy_for` is one dictionary look-up.

    Immutable but for a memo, whose size is bounded by the models and roles that documents name.
    """

    def __init__(
        self,
        producer_delta: int | None,
        *,
        configured: bool,
        thresholds: PullThresholds = NO_THRESHOLDS,
        share: ReplicaShare = ALONE,
    ) -> None:
        self._producer_delta = producer_delta
        self._configured = configured
        self._thresholds = thresholds
        self._share = share
        self._models = {s.model for s in thresholds.rules if s.model is not None}
        self._roles = {s.role for s in thresholds.rules if s.role is not None}
        self._classes = sorted({s.source_class for s in thresholds.rules if s.source_class is not None})
        self._memo: dict[tuple[str | None, str | None], SourcePolicy] = {}

    @property
    def thresholds(self) -> PullThresholds:
        return self._thresholds

    def policy_for(self, model: str | None = None, role: str | None = None) -> SourcePolicy:
        """What applies to a request for `model` computed on an endpoint of `role`."""
        key = (model if model in self._models else None, role if role in self._roles else None)
        policy = self._memo.get(key)
        if policy is None:
            policy = self._memo[key] = self._compile(*key)
        return policy

    def _compile(self, model: str | None, role: str | None) -> SourcePolicy:
        general = self._policy(Scope(model, role), {})
        by_class: dict[str, SourcePolicy] = {}
        for name in self._classes:
            special = self._policy(Scope(model, role, name), {})
            if special != general:
                by_class[name] = special
        return self._policy(Scope(model, role), by_class)

    def _policy(self, scope: Scope, by_class: Mapping[str, SourcePolicy]) -> SourcePolicy:
        settings = self._thresholds.settings_for(scope)
        delta, limit = settings.min_cached_token_delta, settings.max_inflight_pulls
        return SourcePolicy(
            configured=self._configured,
            enabled=settings.enabled is not False,
            min_cached_token_delta=delta if delta is not None else self._producer_delta,
            require_verified=bool(settings.require_verified),
            inflight_awareness=settings.inflight_awareness is not False,
            max_inflight_pulls=None if limit is None else self._share.of(limit),
            mode=settings.mode or MODE_THRESHOLD,
            cost_margin_ms=settings.cost_margin_ms or 0.0,
            generation=self._thresholds.generation,
            by_class=by_class,
        )
