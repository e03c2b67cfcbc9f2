"""Several replicas against the API server double: one leads, or all count each other.

Clocks stand still unless a test moves them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epp.core.thresholds import ReplicaShare
from epp.leases.elector import ElectionTimes, Elector
from epp.leases.record import LeaseName
from epp.leases.roster import Roster
from epp.leases.store import LeaseStore
from sidecar.pool_watch.access import KubeAccess
from tests.integration.kube.rig import FAST, NAMESPACE, Clock, open_access
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.notice import BOUND_S, Notice
from tests.kube.server import KubeServer

LEASE = LeaseName("kvpull-epp", NAMESPACE)
LABELS = {"kvpull.io/replicas-of": "kvpull-epp"}


@pytest.fixture
async def access(kube: KubeServer, tmp_path: Path) -> AsyncIterator[KubeAccess]:
    async with open_access(kube, tmp_path) as opened:
        yield opened


class Replica:
    """An elector with a clock of its own, which may differ from the others' by hours."""

    def __init__(self, access: KubeAccess, name: str, now_s: float = 1000.0) -> None:
        self.clock = Clock()
        self.clock.now_s = now_s
        self.elector = Elector(LeaseStore(access), LEASE, name, clock=self.clock)

    async def after(self, seconds: float) -> bool:
        """Whether it leads when its clock has moved on and it has tried once more."""
        self.clock.now_s += seconds
        await self.elector.attempt()
        return self.elector.is_leader


def holder(kube: KubeServer) -> str:
    return str(kube.store.get(kinds.LEASES.key, NAMESPACE, LEASE.name)["spec"]["holderIdentity"])


# --- one leads ------------------------------------------------------------------------------------
async def test_the_first_one_leads_and_the_other_waits(access: KubeAccess, kubectl: Kubectl) -> None:
    a, b = Replica(access, "a"), Replica(access, "b", now_s=9e6)
    assert await a.after(0)
    assert not await b.after(0)
    for _ in range(20):  # 40 s, longer than the Lease lasts
        assert await a.after(2)
        assert not await b.after(2)
    assert b.elector.holder == "a"
    said = await kubectl.run(
        "get", "lease", LEASE.name, "-o", "jsonpath={.spec.holderIdentity} {.spec.leaseTransitions}"
    )
    assert said == "a 0"


async def test_of_two_that_start_together_one_leads(access: KubeAccess, kube: KubeServer) -> None:
    replicas = [Replica(access, f"r{n}") for n in range(5)]
    leads = await asyncio.gather(*(replica.after(0) for replica in replicas))
    assert sum(leads) == 1
    assert holder(kube) == f"r{leads.index(True)}"


async def test_a_dead_leader_is_followed_when_its_lease_has_run_out(
    access: KubeAccess, kube: KubeServer
) -> None:
    a, b = Replica(access, "a"), Replica(access, "b", now_s=50.0)
    assert await a.after(0)
    assert not await b.after(0)
    assert not await b.after(14.9)
    assert holder(kube) == "a"
    assert await b.after(0.1)
    assert (holder(kube), b.elector.transitions) == ("b", 1)
    assert not await a.after(16), "it comes back, sees the other, and does not lead"
    assert holder(kube) == "b"


async def test_a_leader_that_is_cut_off_has_stopped_before_another_starts(
    access: KubeAccess, kube: KubeServer
) -> None:
    a, b = Replica(access, "a"), Replica(access, "b")
    assert await a.after(0)
    assert not await b.after(0)
    fault = kube.faults.fail(503, plural="leases")
    assert await a.after(9), "one failed renewal is no reason to stop"
    assert a.elector.error
    assert not await a.after(1.5)
    fault.stop()
    assert not await b.after(14), "the Lease has not run out: nobody leads for a moment, never two"
    assert await b.after(1)


async def test_a_leader_that_was_frozen_does_not_lead_when_it_wakes(access: KubeAccess) -> None:
    a = Replica(access, "a")
    assert await a.after(0)
    a.clock.now_s += 60
    assert not a.elector.is_leader, "before it has asked anybody"


async def test_a_leader_that_stops_lets_the_next_one_start_at_once(
    access: KubeAccess, kube: KubeServer
) -> None:
    a, b = Replica(access, "a"), Replica(access, "b")
    assert await a.after(0)
    assert not await b.after(0)
    await a.elector.give_up()
    assert not a.elector.is_leader
    assert await b.after(0)
    assert not await a.after(1), "it is on its way out and does not ask again"
    assert holder(kube) == "b"


async def test_one_that_does_not_lead_takes_nothing_away_when_it_stops(
    access: KubeAccess, kube: KubeServer
) -> None:
    a, b = Replica(access, "a"), Replica(access, "b")
    assert await a.after(0)
    assert not await b.after(0)
    await b.elector.give_up()
    assert holder(kube) == "a"


async def test_a_lease_that_is_no_lease_is_an_error_and_not_a_crown(
    access: KubeAccess, kube: KubeServer
) -> None:
    a = Replica(access, "a")
    kube.faults.fail(403, plural="leases", reason="Forbidden")
    assert not await a.after(0)
    assert "may not get leases.coordination.k8s.io" in (a.elector.error or "")


def test_times_that_would_allow_two_leaders_are_refused() -> None:
    with pytest.raises(ValueError, match="renew deadline < lease duration"):
        ElectionTimes(lease_s=10, renew_deadline_s=10.0)


# --- all count each other -------------------------------------------------------------------------
@dataclass
class Member:
    """A roster whose renewals a test asks for."""

    roster: Roster
    clock: Clock
    shares: list[ReplicaShare] = field(default_factory=list)
    notice: Notice = field(default_factory=Notice)

    async def until_share(self, replicas: int, ordinal: int) -> None:
        await self.notice.until(lambda: self.roster.share == ReplicaShare(replicas, ordinal))

    async def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.roster.renew()
        self.roster.count()


@asynccontextmanager
async def member(access: KubeAccess, name: str) -> AsyncIterator[Member]:
    clock, told = Clock(), Notice()
    shares: list[ReplicaShare] = []

    def on_share(share: ReplicaShare) -> None:
        shares.append(share)
        told.tell()

    async def pause(_: float) -> None:
        await asyncio.Event().wait()  # the test renews

    own = LeaseName(f"kvpull-epp-{name}", NAMESPACE, LABELS, name, f"uid-{name}")
    roster = Roster(access, own, on_share, rules=FAST, clock=clock, pause=pause)
    task = asyncio.create_task(roster.run())
    try:
        yield Member(roster, clock, shares, told)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_shares_follow_who_comes_and_leaves_and_add_up(access: KubeAccess, kube: KubeServer) -> None:
    async with member(access, "a") as a:
        await a.until_share(1, 0)
        assert a.roster.joined
        async with member(access, "c") as c, member(access, "b") as b:
            for one, place in ((a, 0), (b, 1), (c, 2)):
                await one.until_share(3, place)
            for limit in range(12):
                assert sum(m.roster.share.of(limit) for m in (a, b, c) if m.roster.share) == limit
            await b.roster.leave()
            await a.until_share(2, 0)
            await c.until_share(2, 1)
        owner = kube.store.get(kinds.LEASES.key, NAMESPACE, "kvpull-epp-a")["metadata"]["ownerReferences"]
        assert owner == [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "uid-a"}]


async def test_one_that_died_is_not_counted_when_its_lease_has_run_out(access: KubeAccess) -> None:
    async with member(access, "a") as a:
        async with member(access, "b"):
            await a.until_share(2, 0)
        for _ in range(2):  # b is gone without a word; a goes on renewing, and hears the echo
            await a.later(7)
        assert a.roster.share == ReplicaShare(2, 0)
        await a.later(7)
        await a.until_share(1, 0)


async def test_one_that_is_cut_off_keeps_its_share(access: KubeAccess, kube: KubeServer) -> None:
    """The negative: whoever hears nothing must not conclude that it is alone."""
    async with member(access, "a") as a, member(access, "b") as b:
        await a.until_share(2, 0)
        await b.until_share(2, 1)
        fault = kube.faults.fail(503, plural="leases")
        for _ in range(5):
            await a.later(7)
        assert a.shares[-1] == ReplicaShare(2, 0)
        assert a.roster.error
        fault.stop()


async def test_a_watch_that_is_mute_is_not_believed(access: KubeAccess) -> None:
    async with member(access, "a") as a, member(access, "b"):
        await a.until_share(2, 0)
        a.clock.now_s += 100  # neither a's renewals nor anything else has come through the watch
        a.roster.count()
        assert a.roster.share == ReplicaShare(2, 0)


async def test_a_server_that_is_away_from_the_start_does_not_block_for_ever(
    access: KubeAccess, kube: KubeServer
) -> None:
    fault = kube.faults.fail(503, plural="leases")
    async with member(access, "a") as a:
        async with asyncio.timeout(BOUND_S):
            await a.roster.settled.wait()
        await fault.reached(2)  # its own Lease, and the list of all
        assert a.roster.joined
        assert a.roster.share is None


async def test_leases_of_others_are_not_ours(access: KubeAccess, kube: KubeServer) -> None:
    meta = {"name": "kvpull-epp-x", "labels": {"kvpull.io/replicas-of": "another"}}
    spec = {"holderIdentity": "x", "leaseDurationSeconds": 15}
    kube.store.create(kinds.LEASES.key, NAMESPACE, {"metadata": meta, "spec": spec})
    async with member(access, "a") as a:
        await a.until_share(1, 0)
    assert json.dumps(kube.store.get(kinds.LEASES.key, NAMESPACE, "kvpull-epp-x")["spec"]) == json.dumps(spec)
