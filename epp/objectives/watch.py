"""Watches InferenceObjectives and InferenceModelRewrites of one pool.

Neither is needed to serve: a kind that is not installed, or may not be read, is said once and counts as
empty, and readiness does not wait for it. While the API server is away the last known objects stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from epp.core.model_rewrite import ModelRewrites
from epp.objectives.views import Objective, PoolRewrite, view_objective, view_rewrite
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import Resource, Selection
from sidecar.pool_watch.status import WatchStatus

GROUP: Final = "llm-d.ai"
VERSION: Final = "v1alpha2"
_V = TypeVar("_V")


class ObjectiveWatch:
    """Component: `run` until cancelled. `pool` "": objects of every pool of the namespace count."""

    def __init__(
        self,
        access: KubeAccess,
        namespace: str,
        pool: str,
        *,
        group: str = GROUP,
        rules: WatchRules | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._on_change = on_change
        self._priorities: dict[str, int] = {}
        self._rewrites = ModelRewrites()
        self._objectives: _Kept[Objective] = _Kept(self._take_objectives)
        self._objects: _Kept[PoolRewrite] = _Kept(self._take_rewrites)
        self._reflectors = (
            Reflector(
                access,
                Selection(Resource(group, VERSION, "inferenceobjectives"), namespace),
                view_objective,
                self._objectives,
                rules=rules,
            ),
            Reflector(
                access,
                Selection(Resource(group, VERSION, "inferencemodelrewrites"), namespace),
                view_rewrite,
                self._objects,
                rules=rules,
            ),
        )

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Of both watches: age, failures."""
        return tuple(reflector.status for reflector in self._reflectors)

    @property
    def rewrites(self) -> ModelRewrites:
        """In force now; a request keeps the one that it began with."""
        return self._rewrites

    def priority(self, objective: str) -> int:
        """Of the InferenceObjective with this name; 0 where there is none."""
        return self._priorities.get(objective, 0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    def _take_objectives(self) -> None:
        kept = self._objectives.objects.items()
        self._priorities = {name: seen.priority for name, seen in kept if self._is_ours(seen.pool)}
        self._on_change()

    def _take_rewrites(self) -> None:
        kept = self._objects.objects.values()
        self._rewrites = ModelRewrites(seen.object for seen in kept if self._is_ours(seen.pool))
        self._on_change()

    def _is_ours(self, pool: str) -> bool:
        return not self._pool or pool == self._pool


class _Kept(Generic[_V]):
    """Sink of one watch."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.objects: dict[str, _V] = {}
        self._changed = changed

    def replace(self, objects: dict[str, _V]) -> None:
        self.objects = objects
        self._changed()

    def put(self, name: str, value: _V) -> None:
        self.objects[name] = value
        self._changed()

    def remove(self, name: str) -> None:
        self.objects.pop(name, None)
        self._changed()
