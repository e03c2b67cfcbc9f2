"""Active-passive: one replica holds a Lease and serves, the others stay warm and unready.

The holder renews every `retry_s`. It counts itself as leader only for `renew_deadline_s` after it *began*
its last successful renewal, which is shorter than the Lease lasts for the others: it has stopped before
another one starts, also when it was frozen or cut off in between. A replica that stops gives the Lease
up, so that the next one starts at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from epp.leases.record import LeaseName, LeaseRecord, Sighting, micro_time
from epp.leases.store import LeaseStore
from sidecar.pool_watch.errors import KubeError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """As in client-go: renewals are tried every `retry_s`."""

    lease_s: int = 15
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.lease_s:
            raise ValueError("retry < renew deadline < lease duration is needed")


class Elector:
    """Component: `run` until cancelled, `give_up` when the process is about to stop."""

    def __init__(
        self,
        store: LeaseStore,
        lease: LeaseName,
        identity: str,
        *,
        times: ElectionTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._lease = lease
        self._identity = identity
        self._times = times or ElectionTimes()
        self._clock = clock
        self._pause = pause
        self._sighting: Sighting | None = None
        self._renewed_s: float | None = None
        self._stopping = False
        self._busy = asyncio.Lock()
        self.error: str | None = None
        self.transitions = 0

    @property
    def is_leader(self) -> bool:
        """Cheap, and true by time only: asked at every health check."""
        return self._renewed_s is not None and self._clock() - self._renewed_s < self._times.renew_deadline_s

    @property
    def holder(self) -> str:
        """Who holds it as far as is known; empty: nobody."""
        return "" if self._sighting is None else self._sighting.record.holder

    async def run(self) -> None:
        while True:
            await self.attempt()
            await self._pause(self._times.retry_s)

    async def attempt(self) -> None:
        """Renew, take over, or look."""
        was, started_s = self.is_leader, self._clock()
        async with self._busy:
            if self._stopping:
                return
            try:
                held = await self._hold()
            except KubeError as error:
                if self.error is None:
                    log.warning("leader election: %s", error)
                self.error = str(error)
                return
        self.error = None
        self._renewed_s = started_s if held else None
        if held and not was:
            log.info("this replica leads (Lease %s/%s)", self._lease.namespace, self._lease.name)
        elif was and not held:
            log.warning("this replica no longer leads: %s does", self.holder or "nobody")

    async def _hold(self) -> bool:
        """Raises KubeError."""
        found = await self._store.get(self._lease)
        if found is None:
            return await self._put(LeaseRecord(self._identity, self._times.lease_s, acquired=micro_time()))
        self._see(found)
        if found.holder == self._identity:
            return await self._put(found)
        if self._sighting is not None and self._sighting.is_held(self._clock()):
            return False
        taken = replace(found, acquired=micro_time(), transitions=found.transitions + 1)
        return await self._put(taken)

    async def _put(self, record: LeaseRecord) -> bool:
        """Whether we were the fastest. Raises KubeError."""
        ours = replace(record, holder=self._identity, duration_s=self._times.lease_s, renewed=micro_time())
        stored = await self._store.put(self._lease, ours)
        if stored is None:
            return False
        self._see(stored)
        return True

    def _see(self, record: LeaseRecord) -> None:
        self.transitions = record.transitions
        if self._sighting is None:
            self._sighting = Sighting(record, self._clock())
        else:
            self._sighting.see(record, self._clock())

    async def give_up(self) -> None:
        """Unready at once; the Lease is left to the next one. Never raises for a server that is away."""
        self._stopping = True
        led, self._renewed_s = self.is_leader, None
        if not led:
            return
        async with self._busy:
            sighting = self._sighting
            if sighting is None or sighting.record.holder != self._identity:
                return
            freed = replace(sighting.record, holder="", duration_s=1, renewed=micro_time())
            try:
                await self._store.put(self._lease, freed)
            except KubeError as error:
                log.warning("the Lease was not given up, it runs out by itself: %s", error)
