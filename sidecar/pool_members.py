"""The allow-list from an InferencePool: the same watch that gives the picker its endpoints.

A draining endpoint stays a member: legs and pulls that were decided for it are still under way. The
sidecar waits a bounded time for the first list before it serves; without one it serves its own engine and
follows no routing header, until the API server answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

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


@dataclass(frozen=True, slots=True)
class PoolReference:
    """Which pool: `namespace/name`, or a name in the pod's own namespace."""

    name: str
    group: str
    p2p_base_port: int


@asynccontextmanager
async def watch_members(
    pool: PoolReference,
    allow_list: AllowList,
    observer: PoolObserver,
    *,
    environment: Environment | None = None,
    first_list_s: float = FIRST_LIST_S,
) -> AsyncIterator[None]:
    """Feed an allow-list for as long as the context is open.

    Raises:
        AccessError: on entering: there is no API server to be reached from here.
    """
    access = KubeAccess(environment or Environment.of_process())
    await access.open()
    watch = _watch(access, pool, allow_list, observer)
    observer.registry.register(WatchCollector(lambda: watch.statuses, time.monotonic))
    task = asyncio.create_task(watch.run())
    task.add_done_callback(_log_fault)
    try:
        await _first_list(watch, first_list_s)
        _log.info("the pool has %d endpoints", len(allow_list))
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await access.close()


def _watch(
    access: KubeAccess, pool: PoolReference, allow_list: AllowList, observer: PoolObserver
) -> PoolWatch:
    def put(member: Member) -> None:
        allow_list.put(member.row)
        observer.pool_members(len(allow_list))

    def remove(endpoint: EndpointId) -> None:
        allow_list.remove(endpoint)
        observer.pool_members(len(allow_list))

    namespace, _, name = pool.name.rpartition("/")
    view = PoolView(put, remove, p2p_base_port=pool.p2p_base_port)
    namespace = namespace or access.namespace
    return PoolWatch(access, view, namespace=namespace, name=name, group=pool.group)


async def _first_list(watch: PoolWatch, bound_s: float) -> None:
    try:
        async with asyncio.timeout(bound_s):
            await watch.loaded.wait()
    except TimeoutError:
        _log.warning("no routing header is followed yet: %s", watch.problem or "no answer yet")


def _log_fault(task: asyncio.Task[None]) -> None:
    """The watch never ends by itself; if it does, the members stay as they are and somebody must know."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("the pool is not watched any more", exc_info=task.exception())
