"""Active-active: every replica holds a Lease of its own, and all count the living ones.

The count and our place in it give each replica its part of the in-flight pull limits: the parts add up to
the limit. Who is away is found by Leases that no longer change *while the server speaks to us*: a replica
that is cut off itself sees nobody renew, and keeps the share that it had instead of taking everything.

A replica that has joined is counted by the others as soon as their watch tells them, so for that moment (some
milliseconds) the parts can add up to more than the limit; after one has died, for `lease_s` to less.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from epp.core.thresholds import ReplicaShare
from epp.leases.record import LeaseName, LeaseRecord, Sighting, micro_time, read_lease
from epp.leases.store import LeaseStore
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.errors import KubeError
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import LEASES, Selection
from sidecar.pool_watch.status import WatchStatus

log = logging.getLogger(__name__)

MAX_REPLICAS: Final = 64


@dataclass(frozen=True, slots=True)
class RosterTimes:
    """A Lease is renewed every `renew_s`; the others believe it for `lease_s`."""

    lease_s: int = 15
    renew_s: float = 5.0


class Roster:
    """Component: `run` until cancelled, then `leave`. `own.labels` select the Leases of all replicas."""

    def __init__(
        self,
        access: KubeAccess,
        own: LeaseName,
        on_share: Callable[[ReplicaShare], None],
        *,
        times: RosterTimes | None = None,
        rules: WatchRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = LeaseStore(access)
        self._own = own
        self._on_share = on_share
        self._times = times or RosterTimes()
        self._clock = clock
        self._pause = pause
        self._seen: dict[str, Sighting] = {}
        self._share: ReplicaShare | None = None
        self.error: str | None = None
        labels = ",".join(f"{name}={value}" for name, value in sorted(own.labels.items()))
        selection = Selection(LEASES, own.namespace, labels=labels)
        self._reflector = Reflector(access, selection, read_lease, self, rules=rules, clock=clock)

    @property
    def status(self) -> WatchStatus:
        """Of the watch: age, failures."""
        return self._reflector.status

    @property
    def settled(self) -> asyncio.Event:
        """All Leases have been seen, or asking for them has failed."""
        return self._reflector.settled

    @property
    def share(self) -> ReplicaShare | None:
        """None: not known yet."""
        return self._share

    @property
    def joined(self) -> bool:
        """Our Lease is written and all others have been seen, or the server cannot be asked."""
        return self._share is not None or (self._reflector.settled.is_set() and self.error is not None)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reflector.run())
            while True:
                await self.renew()
                self.count()
                await self._pause(self._times.renew_s)

    async def renew(self) -> None:
        """Write our own Lease. A server that is away changes nothing."""
        try:
            found = await self._store.get(self._own)
            record = found or LeaseRecord(self._own.name, self._times.lease_s, acquired=micro_time())
            ours = replace(
                record, holder=self._own.name, duration_s=self._times.lease_s, renewed=micro_time()
            )
            stored = await self._store.put(self._own, ours)
        except KubeError as error:
            if self.error is None:
                log.warning("replicas: %s (this one keeps its share of the pull limits)", error)
            self.error = str(error)
            return
        self.error = None
        if stored is not None:
            self.put(self._own.name, stored)

    async def leave(self) -> None:
        """Take our Lease away: the others share what was ours. Never raises for a server that is away."""
        try:
            await self._store.delete(self._own)
        except KubeError as error:
            log.warning("our Lease was not removed, it runs out by itself: %s", error)

    def count(self) -> None:
        """Who lives, as far as can be told; tells a share that has changed."""
        now_s = self._clock()
        if not self._hears(now_s):
            return  # whoever seems to be silent may not be
        living = {name for name, seen in self._seen.items() if seen.is_held(now_s)} | {self._own.name}
        names = sorted(living)
        if len(names) > MAX_REPLICAS:
            log.error("replicas: %d Leases are labelled as ours; the share stays as it was", len(names))
            return
        share = ReplicaShare(len(names), names.index(self._own.name))
        if share != self._share:
            log.info("replicas: %d live, this one is number %d", share.replicas, share.ordinal)
            self._share = share
            self._on_share(share)

    def _hears(self, now_s: float) -> bool:
        """The watch is alive: it brings at least the echo of our own renewals."""
        if not self._reflector.synced.is_set() or self.error is not None or self.status.error is not None:
            return False
        return now_s - (self.status.contact_s or 0.0) < 2 * self._times.renew_s

    # --- sink of the watch ------------------------------------------------------------------------
    def replace(self, leases: dict[str, LeaseRecord]) -> None:
        """All Leases that the label selects."""
        for name in self._seen.keys() - leases.keys():
            del self._seen[name]
        for name, record in leases.items():
            self._see(name, record)

    def put(self, name: str, record: LeaseRecord) -> None:
        """One was renewed, or is new."""
        self._see(name, record)
        self.count()

    def remove(self, name: str) -> None:
        """One is gone: that replica has left."""
        self._seen.pop(name, None)
        self.count()

    def _see(self, name: str, record: LeaseRecord) -> None:
        seen = self._seen.get(name)
        if seen is None:
            self._seen[name] = Sighting(record, self._clock())
        else:
            seen.see(record, self._clock())
