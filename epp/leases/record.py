"""A Lease as we read and write it, and when one has run out. Pure.

No clock of another machine is believed: a Lease has run out when it has not *changed* for its duration as
measured here, as client-go does it. So replicas with wrong clocks agree all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

MAX_DURATION_S: Final = 3600  # a longer one is not ours, and would keep a dead holder alive


class _Meta(msgspec.Struct):
    revision: str = msgspec.field(name="resourceVersion", default="")
    labels: dict[str, str] | None = None


class _Spec(msgspec.Struct):
    holder: str | None = msgspec.field(name="holderIdentity", default=None)
    duration_s: int | None = msgspec.field(name="leaseDurationSeconds", default=None)
    acquired: str | None = msgspec.field(name="acquireTime", default=None)
    renewed: str | None = msgspec.field(name="renewTime", default=None)
    transitions: int | None = msgspec.field(name="leaseTransitions", default=None)


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: _Spec | None = None


_decode = msgspec.json.Decoder(_Lease).decode


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One Lease. `holder` is empty when it was given up; `revision` is what an update must name."""

    holder: str
    duration_s: int
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    revision: str = ""


def read_lease(raw: bytes | msgspec.Raw) -> LeaseRecord:
    """Raises msgspec.DecodeError: it is no Lease."""
    lease = _decode(raw)
    spec = lease.spec or _Spec()
    return LeaseRecord(
        holder=spec.holder or "",
        duration_s=min(max(spec.duration_s or 1, 1), MAX_DURATION_S),
        acquired=spec.acquired or "",
        renewed=spec.renewed or "",
        transitions=spec.transitions or 0,
        revision=lease.metadata.revision,
    )


@dataclass(frozen=True, slots=True)
class LeaseName:
    """Where a Lease lies and what marks it; with the pod's `owner_uid` the cluster removes both together."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    owner_uid: str = ""

    def body(self, record: LeaseRecord) -> dict[str, Any]:
        """The object to create or update."""
        meta: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if self.labels:
            meta["labels"] = dict(self.labels)
        if record.revision:
            meta["resourceVersion"] = record.revision
        if self.owner_uid:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self.owner, "uid": self.owner_uid}
            meta["ownerReferences"] = [owner]
        times = {"acquireTime": record.acquired, "renewTime": record.renewed}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {
                "holderIdentity": record.holder,
                "leaseDurationSeconds": record.duration_s,
                "leaseTransitions": record.transitions,
            }
            | {name: value for name, value in times.items() if value},
        }


def micro_time() -> str:
    """Now, in the form of a Lease's times. For people who read it; we compare it for equality only."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Sighting:
    """When one Lease was last seen to change, by our own clock."""

    __slots__ = ("record", "since_s")

    def __init__(self, record: LeaseRecord, now_s: float) -> None:
        self.record = record
        self.since_s = now_s

    def see(self, record: LeaseRecord, now_s: float) -> None:
        """Note what it says now."""
        if (record.holder, record.renewed) != (self.record.holder, self.record.renewed):
            self.since_s = now_s
        self.record = record

    def is_held(self, now_s: float) -> bool:
        """Somebody holds it, and has renewed it within its duration."""
        return bool(self.record.holder) and now_s - self.since_s < self.record.duration_s
