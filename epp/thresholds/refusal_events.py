"""Refused ConfigMaps as Kubernetes Events, so that `kubectl describe configmap` shows what is wrong.

An aid, never a duty: without the right to create Events it says so once and stays silent; at most
`MAX_PER_HOUR` are written, and the same words about the same ConfigMap only once in a row.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from epp.thresholds.config_maps import Refused
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.errors import Denied, KubeError
from sidecar.pool_watch.resources import EVENTS, Call

log = logging.getLogger(__name__)

MAX_PER_HOUR: Final = 20
MAX_WAITING: Final = 8
_MAX_MESSAGE_CHARS: Final = 1000  # an Event's message has at most 1,024
_COMPONENT: Final = "kvpull-epp"


class RefusalEvents:
    """Component: writes what `tell` was given."""

    def __init__(
        self, access: KubeAccess, namespace: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._access = access
        self._namespace = namespace
        self._clock = clock
        self._waiting: asyncio.Queue[Refused] = asyncio.Queue(MAX_WAITING)
        self._written_s: deque[float] = deque(maxlen=MAX_PER_HOUR)
        self._last: Refused | None = None
        self._denied = False
        self.dropped = 0

    def tell(self, refused: Refused) -> None:
        """Never blocks; what is too much is dropped and counted."""
        if self._denied or refused == self._last:
            return
        full = len(self._written_s) == MAX_PER_HOUR and self._clock() - self._written_s[0] < 3600
        if full or self._waiting.full():
            self.dropped += 1
            return
        self._last = refused
        self._written_s.append(self._clock())
        self._waiting.put_nowait(refused)

    async def run(self) -> None:
        while True:
            refused = await self._waiting.get()
            try:
                call = Call("create", EVENTS, self._namespace, body=self._event(refused))
                await self._access.read(call)
            except Denied as error:
                self._denied = True
                log.info("no Events about refused thresholds: %s", error)
            except KubeError as error:
                log.warning("an Event about refused thresholds was not written: %s", error)

    def _event(self, refused: Refused) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"apiVersion": "v1", "kind": "ConfigMap", "name": refused.config_map}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{refused.config_map[:200]}.{uuid.uuid4().hex[:16]}",
                "namespace": self._namespace,
            },
            "involvedObject": about | {"namespace": self._namespace, "uid": refused.uid},
            "reason": "PullThresholdsRefused",
            "message": f"not in force, the last good thresholds stay: {refused.why}"[:_MAX_MESSAGE_CHARS],
            "type": "Warning",
            "source": {"component": _COMPONENT},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
