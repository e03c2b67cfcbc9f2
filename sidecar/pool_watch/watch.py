"""One pool, watched: the InferencePool object, and the pods that it selects.

The pods are watched with the pool's own selector; when that changes, a new watch starts and the rows of
the old one stay until its first list is in. `loaded` is set once pool and pods have been seen whole, and
stays set: afterwards the last known state is served for as long as the API server is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.pool_view import PoolObject, PoolView
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import PODS, POOL_GROUP, Selection, inference_pools
from sidecar.pool_watch.status import WatchStatus
from sidecar.pool_watch.views import InvalidPool, PodView, PoolSpec, view_pod, view_pool

_log = logging.getLogger(__name__)


class PoolWatch:
    """Component: `run` until cancelled. Give `name` (an InferencePool) or `spec` (no such object)."""

    def __init__(
        self,
        access: KubeAccess,
        view: PoolView,
        *,
        namespace: str,
        name: str = "",
        spec: PoolSpec | None = None,
        group: str = POOL_GROUP,
        rules: WatchRules | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._access = access
        self._view = view
        self._namespace = namespace
        self._rules = rules or WatchRules()
        self._rng = rng or random.Random()
        self._spec: PoolSpec | None = None
        self._changed = asyncio.Event()
        self._object = PoolObject(name, self._take_spec, partial(_log.warning, "%s"))
        self._pool: Reflector[PoolSpec | InvalidPool] | None = None
        self._pods: Reflector[PodView] | None = None
        self._selector = ""  # of the pods that are watched now
        self.loaded: Final = asyncio.Event()
        if spec is not None:
            self._take_spec(spec)
        else:
            selection = Selection.named(inference_pools(group), namespace, name)
            self._pool = Reflector(
                access, selection, view_pool, self._object, rules=self._rules, rng=self._rng
            )

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Of the pool's watch and of the pods', as far as they exist."""
        return tuple(watch.status for watch in (self._pool, self._pods) if watch is not None)

    @property
    def problem(self) -> str | None:
        """Why the endpoints are not what the cluster says now; None: they are."""
        errors = [status.error for status in self.statuses if status.error]
        return self._object.problem or (errors[0] if errors else None)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._pool is not None:
                group.create_task(self._pool.run())
            watching: asyncio.Task[None] | None = None
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._spec is not None and self._spec.label_selector != self._selector:
                    if watching is not None:
                        watching.cancel()
                    self._pods = self._watch_pods(self._spec)
                    watching = group.create_task(self._pods.run())

    def _take_spec(self, spec: PoolSpec | None) -> None:
        self._spec = spec
        if spec is None or spec.label_selector == self._selector:
            self._view.set_spec(spec)  # else: together with the first list of the new selection
        self._changed.set()

    def _watch_pods(self, spec: PoolSpec) -> Reflector[PodView]:
        self._selector = spec.label_selector
        selection = Selection(PODS, self._namespace, labels=self._selector)
        sink = _Pods(self._view, lambda: self._spec, self.loaded)
        return Reflector(self._access, selection, view_pod, sink, rules=self._rules, rng=self._rng)


class _Pods:
    """Sink between reflector and view: the first list of a new selection brings its spec with it."""

    def __init__(self, view: PoolView, spec: Callable[[], PoolSpec | None], loaded: asyncio.Event) -> None:
        self._view = view
        self._spec = spec
        self._loaded = loaded
        self.put = view.put
        self.remove = view.remove

    def replace(self, pods: dict[str, PodView]) -> None:
        self._view.replace(pods, self._spec())
        self._loaded.set()
