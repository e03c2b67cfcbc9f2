"""The few values we keep of both kinds, from their JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from epp.core.model_rewrite import RewriteObject, RewriteRule, RewriteTarget

MAX_WEIGHT: Final = 1_000_000


class _Ref(msgspec.Struct):
    name: str = ""


class _Meta(msgspec.Struct):
    name: str = ""
    created: str | None = msgspec.field(name="creationTimestamp", default=None)
    deleted: str | None = msgspec.field(name="deletionTimestamp", default=None)


class _ObjectiveSpec(msgspec.Struct):
    pool: _Ref = msgspec.field(name="poolRef", default_factory=_Ref)
    priority: int | None = None


class _Objective(msgspec.Struct):
    metadata: _Meta
    spec: _ObjectiveSpec


class _Model(msgspec.Struct):
    value: str
    type: str = "Exact"


class _Match(msgspec.Struct):
    model: _Model


class _Target(msgspec.Struct):
    model: str = msgspec.field(name="modelRewrite")
    weight: int | None = None


class _Rule(msgspec.Struct):
    targets: list[_Target]
    matches: list[_Match] | None = None


class _RewriteSpec(msgspec.Struct):
    rules: list[_Rule]
    pool: _Ref = msgspec.field(name="poolRef", default_factory=_Ref)


class _Rewrite(msgspec.Struct):
    metadata: _Meta
    spec: _RewriteSpec


_read_objective = msgspec.json.Decoder(_Objective).decode
_read_rewrite = msgspec.json.Decoder(_Rewrite).decode


@dataclass(frozen=True, slots=True)
class Objective:
    """`priority` 0 is the default, below 0 may be shed."""

    pool: str
    priority: int


@dataclass(frozen=True, slots=True)
class PoolRewrite:
    """An InferenceModelRewrite, and the pool that it is for."""

    pool: str
    object: RewriteObject


def view_objective(raw: msgspec.Raw | bytes) -> Objective:
    """Raises msgspec.ValidationError."""
    objective = _read_objective(raw)
    return Objective(objective.spec.pool.name, objective.spec.priority or 0)


def view_rewrite(raw: msgspec.Raw | bytes) -> PoolRewrite:
    """Raises ValueError (msgspec.ValidationError is one): a rule that cannot be meant."""
    rewrite = _read_rewrite(raw)
    rules = tuple(_rule(rule) for rule in rewrite.spec.rules)
    meta = rewrite.metadata
    return PoolRewrite(rewrite.spec.pool.name, RewriteObject(meta.name, meta.created or "", rules))


def _rule(rule: _Rule) -> RewriteRule:
    models = []
    for match in rule.matches or ():
        if match.model.type != "Exact":
            raise ValueError(f"a match of type {match.model.type[:40]}: only Exact is known")
        models.append(match.model.value)
    if not rule.targets:
        raise ValueError("a rule without targets")
    targets = tuple(RewriteTarget(t.model, 1 if t.weight is None else t.weight) for t in rule.targets)
    if not all(target.model and 0 < target.weight <= MAX_WEIGHT for target in targets):
        raise ValueError(f"a target without a model, or with a weight that is not 1 to {MAX_WEIGHT}")
    return RewriteRule(tuple(models), targets)
