"""Which model a request is really for, by InferenceModelRewrite objects. Pure.

    a rule that names the model       before a rule without matches (which is for every model)
    two objects name one model        the older object has it, then the one whose name sorts first
    several targets                   one of them, by weight, sampled by the request id: a replay agrees

Source: Gateway API Inference Extension, proposal 1816 and its API documentation (v1alpha2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from epp.core.kv_source import sampling_coordinate


@dataclass(frozen=True, slots=True)
class RewriteTarget:
    """A model, and its weight among the targets of a rule."""

    model: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """`models` empty: for every model."""

    models: tuple[str, ...]
    targets: tuple[RewriteTarget, ...]


@dataclass(frozen=True, slots=True)
class RewriteObject:
    """One InferenceModelRewrite. `created` is RFC 3339 in UTC: texts compare like times."""

    name: str
    created: str
    rules: tuple[RewriteRule, ...]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What was chosen, and by which object."""

    model: str
    object_name: str


class ModelRewrites:
    """All objects of a pool, merged."""

    def __init__(self, objects: Iterable[RewriteObject] = ()) -> None:
        self._exact: dict[str, _Choice] = {}
        self._any: _Choice | None = None
        for obj in sorted(objects, key=lambda o: (o.created, o.name)):
            for rule in obj.rules:
                choice = _Choice(obj.name, rule.targets)
                if not rule.models and self._any is None:
                    self._any = choice
                for model in rule.models:
                    self._exact.setdefault(model, choice)

    def __len__(self) -> int:
        return len(self._exact) + (self._any is not None)

    def choose(self, model: str, request_id: str) -> Rewrite | None:
        """None: no rule is for it. A target may be the model itself."""
        choice = self._exact.get(model, self._any)
        return None if choice is None else choice.sample(request_id)


class _Choice:
    __slots__ = ("_bounds", "_name", "_targets")

    def __init__(self, name: str, targets: tuple[RewriteTarget, ...]) -> None:
        self._name = name
        self._targets = targets
        self._bounds = list(accumulate(target.weight for target in targets))

    def sample(self, request_id: str) -> Rewrite:
        # not the coordinate that samples the source: a model must not always meet the same peer
        place = sampling_coordinate(f"rewrite/{request_id}") * self._bounds[-1]
        at = min(bisect_right(self._bounds, place), len(self._targets) - 1)
        return Rewrite(self._targets[at].model, self._name)
