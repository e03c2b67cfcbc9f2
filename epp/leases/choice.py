"""How several replicas of the picker work together: one value chooses.

none              this replica knows of no other
active-active     all serve; each takes its part of the pull limits (`roster`)
active-passive    the leader serves, the others are warm and unready (`elector`)
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epp.core.errors import ConfigError
from epp.core.thresholds import ReplicaShare
from epp.leases.elector import ElectionTimes, Elector
from epp.leases.record import LeaseName
from epp.leases.roster import Roster
from epp.leases.store import LeaseStore
from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.errors import AccessError
from sidecar.pool_watch.status import WatchStatus

ROLE_LABEL = "kvpull.io/replicas-of"
_NOT_A_NAME = re.compile(r"[^a-z0-9.-]+")
_MAX_NAME_CHARS = 253


class HaMode(enum.Enum):
    """What several replicas do."""

    NONE = "none"
    ACTIVE_ACTIVE = "active-active"
    ACTIVE_PASSIVE = "active-passive"


@dataclass(frozen=True, slots=True)
class HaFacts:
    """For metrics. `replicas` 0: not known."""

    mode: HaMode
    replicas: int
    leads: bool
    error: str | None


class HighAvailability:
    """Component: `open`, `run` until cancelled; `on_drain` when the process is told to stop, `close` last."""

    def __init__(
        self,
        mode: HaMode,
        lease_name: str,
        on_share: Callable[[ReplicaShare], None],
        *,
        namespace: str | None = None,
        environment: Environment | None = None,
        times: ElectionTimes | None = None,
    ) -> None:
        environment = environment or Environment.of_process()
        self.mode = mode
        self._access = KubeAccess(environment)
        self._elector: Elector | None = None
        self._roster: Roster | None = None
        identity, uid = _identity(environment.variables)
        namespace = namespace or self._access.namespace
        if mode is HaMode.ACTIVE_PASSIVE:
            store = LeaseStore(self._access)
            self._elector = Elector(
                store, LeaseName(lease_name, namespace), identity, times=times or ElectionTimes()
            )
        elif mode is HaMode.ACTIVE_ACTIVE:
            own = LeaseName(
                _lease_name(lease_name, identity), namespace, {ROLE_LABEL: lease_name}, identity, uid
            )
            self._roster = Roster(self._access, own, on_share)

    @property
    def facts(self) -> HaFacts:
        if self._elector is not None:
            return HaFacts(self.mode, 0, self._elector.is_leader, self._elector.error)
        if self._roster is not None:
            share = self._roster.share
            return HaFacts(self.mode, 0 if share is None else share.replicas, True, self._roster.error)
        return HaFacts(self.mode, 1, True, None)

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Of its watches."""
        return () if self._roster is None else (self._roster.status,)

    def ready(self) -> bool:
        """Whether requests may be sent to this replica, as far as the others are concerned."""
        if self._elector is not None:
            return self._elector.is_leader
        return self._roster is None or self._roster.joined

    async def open(self) -> None:
        """Raises ConfigError: there is no API server to be reached from here."""
        if self.mode is HaMode.NONE:
            return
        try:
            await self._access.open()
        except AccessError as error:
            raise ConfigError(f"--ha-mode {self.mode.value}: {error}") from error

    async def run(self) -> None:
        if self._elector is not None:
            await self._elector.run()
        elif self._roster is not None:
            await self._roster.run()
        else:
            await asyncio.Event().wait()

    async def on_drain(self) -> None:
        """A leader hands over at once: the next one serves while this one drains."""
        if self._elector is not None:
            await self._elector.give_up()

    async def close(self) -> None:
        """Its pulls have ended by now: its part of the limits goes to the others."""
        if self._roster is not None:
            await self._roster.leave()
        if self.mode is not HaMode.NONE:
            await self._access.close()


def _identity(variables: Mapping[str, str]) -> tuple[str, str]:
    """The pod's name and uid; outside of a cluster the machine's name."""
    name = variables.get("POD_NAME") or socket.gethostname()
    return name, variables.get("POD_UID", "")


def _lease_name(prefix: str, identity: str) -> str:
    """A name that Kubernetes allows."""
    tail = _NOT_A_NAME.sub("-", identity.lower()).strip("-.") or "replica"
    return f"{prefix}-{tail}"[:_MAX_NAME_CHARS].rstrip("-.")
