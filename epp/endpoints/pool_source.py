"""Endpoints from an InferencePool (or a bare selector) as the Kubernetes API tells it.

The counterpart of `file_source` in a cluster: the same rows, and one thing more, which endpoints are
draining. A pod that is being deleted, or is not ready any more, takes no new work and is no source, while
what is known of its cache stays. While the API server is away the last known endpoints stay.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_plugin.identity import EndpointId
from sidecar.endpoint_file import EndpointRow
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.pool_view import Member, PoolView
from sidecar.pool_watch.reflector import WatchRules
from sidecar.pool_watch.resources import POOL_GROUP
from sidecar.pool_watch.status import WatchStatus
from sidecar.pool_watch.views import PoolSpec
from sidecar.pool_watch.watch import PoolWatch


class PoolSource:
    """Component. Callbacks run on the loop and must not block; `on_upsert` also gets `draining`."""

    def __init__(
        self,
        access: KubeAccess,
        *,
        namespace: str,
        on_upsert: Callable[[EndpointRow, bool], None],
        on_remove: Callable[[EndpointId], None],
        name: str = "",
        spec: PoolSpec | None = None,
        group: str = POOL_GROUP,
        rules: WatchRules | None = None,
    ) -> None:
        """`name` of an InferencePool, or `spec` where there is no such object."""
        self._on_upsert = on_upsert
        self._view = PoolView(self._put, on_remove)
        self._watch = PoolWatch(
            access, self._view, namespace=namespace, name=name, spec=spec, group=group, rules=rules
        )
        self.loaded = self._watch.loaded  # set once pool and pods have been seen whole; it stays set

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Of its watches: age, failures."""
        return self._watch.statuses

    @property
    def problem(self) -> str | None:
        """Why the endpoints are not what the cluster says now."""
        return self._watch.problem

    async def run(self) -> None:
        await self._watch.run()

    def _put(self, member: Member) -> None:
        self._on_upsert(member.row, member.draining)
