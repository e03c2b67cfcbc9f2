"""The allow-list from an InferencePool: the same watch that gives the picker its endpoints.

A draining endpoint stays a member: legs and pulls that were decided for it are still under way. The
sidecar waits a bounded time for the first list before it serves; without one it serves its own engine and
follows no routing header, until the API server answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Final, Protocol, Self

from prometheus_client import CollectorRegistry

from engine_plugin.identity import EndpointId
from sidecar.allowlist import AllowList
from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.metrics import WatchCollector
from sidecar.pool_watch.pool_view import Member, PoolView
from sidecar.pool_watch.watch import PoolWatch

_log = logging.getLogger(__name__)

FIRST_LIST_S: Final = 10.0


class PoolObserver(Protocol):
    """What telemetry wants to know."""

    registry: CollectorRegistry

    def pool_members(self, count: int) -> None: ...


class PoolSettings(Protocol):
    """What of the configuration matters here."""

    @property
    def pool_group(self) -> str: ...

    @property
    def p2p_base_port(self) -> int: ...


class PoolMembers:
    """Feeds an allow-list for as long as the context is open.

    Raises on entering:
        AccessError: there is no API server to be reached from here.
    """

    def __init__(
        self,
        pool: str,
        allow_list: AllowList,
        observer: PoolObserver,
        settings: PoolSettings,
        *,
        environment: Environment | None = None,
        first_list_s: float = FIRST_LIST_S,
    ) -> None:
        """`pool`: `namespace/name`, or a name in the pod's own namespace."""
        self._allow_list = allow_list
        self._observer = observer
        self._first_list_s = first_list_s
        self._access = KubeAccess(environment or Environment.of_process())
        namespace, _, name = pool.rpartition("/")
        self._watch = PoolWatch(
            self._access,
            PoolView(self._put, self._remove, p2p_base_port=settings.p2p_base_port),
            namespace=namespace or self._access.namespace,
            name=name,
            group=settings.pool_group,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._access.open()
        self._observer.registry.register(WatchCollector(lambda: self._watch.statuses, time.monotonic))
        self._task = asyncio.create_task(self._watch.run())
        self._task.add_done_callback(_log_fault)
        loading = asyncio.create_task(self._watch.loaded.wait())
        try:
            await asyncio.wait(
                [loading, self._task], timeout=self._first_list_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            loading.cancel()
        if self._watch.loaded.is_set():
            _log.info("the pool has %d endpoints", len(self._allow_list))
        else:
            _log.warning("no routing header is followed yet: %s", self._watch.problem or "no answer yet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._access.close()

    def _put(self, member: Member) -> None:
        self._allow_list.put(member.row)
        self._observer.pool_members(len(self._allow_list))

    def _remove(self, endpoint: EndpointId) -> None:
        self._allow_list.remove(endpoint)
        self._observer.pool_members(len(self._allow_list))


def _log_fault(task: asyncio.Task[None]) -> None:
    """The watch never ends by itself; if it does, the members stay as they are and somebody must know."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("the pool is not watched any more", exc_info=task.exception())
