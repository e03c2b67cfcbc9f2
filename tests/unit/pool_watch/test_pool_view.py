"""Endpoints from pods: each line of the table in sidecar/pool_watch/pool_view.py, and what churn leaves."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

from engine_plugin.identity import EndpointId
from sidecar.pool_watch.pool_view import Member, PoolObject, PoolView
from sidecar.pool_watch.views import InvalidPool, PodView, PoolSpec

ONE_RANK = PoolSpec({"app": "llama"}, (8000,))
TWO_RANKS = PoolSpec({"app": "llama"}, (8000, 8001))
IP = "10.0.0.1"


def pod(uid: str = "u1", ip: str = IP, *, ready: bool = True, deleting: bool = False, **more: Any) -> PodView:
    return PodView(uid, more.pop("created", "2026-01-01T00:00:00Z"), ip, ready, deleting, **more)


class Pool:
    """A view, and what it has told."""

    def __init__(self, spec: PoolSpec | None = ONE_RANK) -> None:
        self.told: list[str] = []
        self.now: dict[EndpointId, Member] = {}
        self.view = PoolView(self._put, self._remove)
        self.view.set_spec(spec)

    def _put(self, member: Member) -> None:
        addresses = {m.row.serving: m.row.id for m in self.now.values()}
        assert addresses.get(member.row.serving, member.row.id) == member.row.id, (
            "two endpoints at one address"
        )
        self.now[member.row.id] = member
        self.told.append(f"{'drain' if member.draining else 'put'} {member.row.id} {member.row.serving}")

    def _remove(self, endpoint: EndpointId) -> None:
        del self.now[endpoint]  # told exactly once
        self.told.append(f"remove {endpoint}")

    def said(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_a_ready_pod_is_one_endpoint_for_each_target_port() -> None:
    pool = Pool(TWO_RANKS)
    pool.view.put("a", pod(labels={"llm-d.ai/role": "decode"}))
    assert pool.said() == [f"put a/0 {IP}:8000", f"put a/1 {IP}:8001"]
    row = pool.now[EndpointId("a", 1)].row
    assert (row.metrics_port, row.events_port, row.replay_port, row.p2p_port) == (8001, 5558, 5658, 7778)
    assert row.labels == {"llm-d.ai/role": "decode"}


def test_a_pod_counts_once_it_is_ready() -> None:
    pool = Pool()
    pool.view.put("a", pod(ip="", ready=False))
    pool.view.put("a", pod(ready=False))
    assert pool.said() == []
    pool.view.put("a", pod())
    assert pool.said() == [f"put a/0 {IP}:8000"]


def test_the_same_again_says_nothing() -> None:
    pool = Pool()
    for _ in range(3):
        pool.view.put("a", pod())
    pool.view.replace({"a": pod()}, ONE_RANK)
    assert pool.said() == [f"put a/0 {IP}:8000"]


def test_unready_drains_and_comes_back() -> None:
    pool = Pool()
    pool.view.put("a", pod())
    pool.view.put("a", pod(ready=False))
    pool.view.put("a", pod())
    assert pool.said() == [f"put a/0 {IP}:8000", f"drain a/0 {IP}:8000", f"put a/0 {IP}:8000"]


def test_deletion_drains_until_the_pod_is_gone() -> None:
    pool = Pool()
    pool.view.put("a", pod())
    pool.view.put("a", pod(deleting=True))
    pool.view.put("a", pod(deleting=True, ready=False))
    pool.view.remove("a")
    assert pool.said() == [f"put a/0 {IP}:8000", f"drain a/0 {IP}:8000", "remove a/0"]


def test_a_pod_that_is_deleted_already_never_counts() -> None:
    pool = Pool()
    pool.view.replace({"a": pod(deleting=True)}, ONE_RANK)
    assert pool.said() == []


def test_a_pod_that_ends_leaves() -> None:
    pool = Pool()
    pool.view.put("a", pod())
    pool.view.put("a", pod(ip="", ready=False))
    assert pool.said()[1:] == ["remove a/0"]


def test_the_same_name_with_another_uid_is_another_engine() -> None:
    """A StatefulSet's pod comes back under its name, here even at its address: its cache is empty."""
    pool = Pool()
    pool.view.put("a-0", pod("u1"))
    pool.view.put("a-0", pod("u2"))
    assert pool.said() == [f"put a-0/0 {IP}:8000", "remove a-0/0", f"put a-0/0 {IP}:8000"]


def test_the_same_name_with_another_uid_after_a_list() -> None:
    pool = Pool()
    pool.view.put("a-0", pod("u1"))
    pool.view.replace({"a-0": pod("u2", ready=False)}, ONE_RANK)
    assert pool.said()[1:] == ["remove a-0/0"]


def test_an_address_that_is_given_out_anew_belongs_to_the_younger_pod() -> None:
    pool = Pool()
    pool.view.put("old", pod("u1", created="2026-01-01T00:00:00Z"))
    pool.view.put("new", pod("u2", created="2026-01-01T00:00:09Z"))  # the old one's end is not told yet
    assert pool.said() == [f"put old/0 {IP}:8000", "remove old/0", f"put new/0 {IP}:8000"]
    pool.view.remove("old")
    assert pool.said() == []


def test_an_address_goes_back_when_its_younger_owner_has_gone() -> None:
    pool = Pool()
    pool.view.put("new", pod("u2", created="2026-01-01T00:00:09Z"))
    pool.view.put("old", pod("u1", created="2026-01-01T00:00:00Z"))
    assert pool.said() == [f"put new/0 {IP}:8000"]
    pool.view.remove("new")
    assert pool.said() == ["remove new/0", f"put old/0 {IP}:8000"]


def test_an_address_passes_on_in_one_list() -> None:
    pool = Pool()
    pool.view.put("a", pod("u1"))
    pool.view.replace({"b": pod("u2")}, ONE_RANK)
    assert pool.said()[1:] == ["remove a/0", f"put b/0 {IP}:8000"]


def test_only_active_ports_are_endpoints() -> None:
    pool = Pool(TWO_RANKS)
    pool.view.put("a", pod(active_ports=frozenset({8001})))
    assert pool.said() == [f"put a/1 {IP}:8001"]
    pool.view.put("a", pod())
    assert pool.said() == [f"put a/0 {IP}:8000"]


def test_the_pools_ports_change_while_its_pods_stay() -> None:
    pool = Pool(TWO_RANKS)
    pool.view.put("a", pod())
    pool.said()
    pool.view.set_spec(PoolSpec({"app": "llama"}, (8000,)))
    assert pool.said() == ["remove a/1"]
    pool.view.set_spec(PoolSpec({"app": "llama"}, (9000,)))
    assert pool.said() == [f"put a/0 {IP}:9000"]
    pool.view.set_spec(None)
    assert pool.said() == ["remove a/0"]
    pool.view.set_spec(ONE_RANK)
    assert pool.said() == [f"put a/0 {IP}:8000"]


def test_ipv6() -> None:
    pool = Pool()
    pool.view.put("a", pod(ip="2001:db8::1"))
    assert pool.said() == ["put a/0 [2001:db8::1]:8000"]


def test_a_thousand_rounds_of_churn_leave_nothing() -> None:
    """Names and addresses come back all the time; the naive answer is right after every round."""
    rng = random.Random(9)
    pool = Pool(TWO_RANKS)
    alive: dict[str, PodView] = {}
    for round_number in range(1000):
        name = f"p-{rng.randrange(12)}"
        created = f"2026-01-01T00:{round_number // 60:02}:{round_number % 60:02}Z"
        view = pod(
            f"u{round_number}", f"10.0.0.{rng.randrange(1, 9)}", ready=rng.random() < 0.8, created=created
        )
        match rng.randrange(4):
            case 0:
                alive.pop(name, None)
                pool.view.remove(name)
            case 1 if name in alive:
                old = alive[name]
                alive[name] = pod(old.uid, old.ip, deleting=True, created=old.created)
                pool.view.put(name, alive[name])
            case 2:
                kept = {key: value for key, value in alive.items() if rng.random() < 0.9}
                alive = kept
                pool.view.replace(dict(kept), TWO_RANKS)
            case _:
                alive[name] = view
                pool.view.put(name, view)
        _check(pool, alive)
    for name in list(alive):
        pool.view.remove(name)
    assert pool.now == {}
    gc.collect()
    left = Counter(type(item).__name__ for item in gc.get_referents(*gc.get_referents(pool.view)))
    assert left["PodView"] == left["Member"] == 0
    assert (pool.view.pods, pool.view.members) == (0, ())
    assert not any(map(len, (pool.view._pods, pool.view._by_ip, pool.view._members)))


def _check(pool: Pool, alive: dict[str, PodView]) -> None:
    """Nobody is an endpoint who must not be, everybody who must; told and kept are the same."""
    owners = {}
    for name, view in alive.items():
        owner = owners.setdefault(view.ip, name)
        if (view.created, view.uid) > (alive[owner].created, alive[owner].uid):
            owners[view.ip] = name
    names = {endpoint.pod for endpoint in pool.now}
    assert names <= {name for name, view in alive.items() if owners[view.ip] == name}
    ready = {n for n, v in alive.items() if owners[v.ip] == n and v.ready and not v.deleting}
    assert ready <= names
    assert {m.row.id.pod for m in pool.now.values() if not m.draining} == ready
    assert set(pool.view.members) == set(pool.now.values())
    assert all(alive[e.pod].ip == m.row.host for e, m in pool.now.items())


def test_an_invalid_pool_changes_nothing_and_is_said() -> None:
    specs: list[PoolSpec | None] = []
    told: list[str] = []
    sink = PoolObject("llama", specs.append, told.append)
    for _ in range(3):
        sink.replace({})
    assert sink.problem == "InferencePool llama does not exist"
    sink.put("llama", ONE_RANK)
    assert sink.problem is None
    sink.put("llama", InvalidPool("spec.targetPorts: a number is there twice"))
    assert sink.problem == "InferencePool llama: spec.targetPorts: a number is there twice"
    sink.put("other", TWO_RANKS)
    sink.remove("other")
    assert specs == [None, None, None, ONE_RANK]
    sink.remove("llama")
    assert specs[4:] == [None]
    assert told == [
        "InferencePool llama does not exist",
        "InferencePool llama: spec.targetPorts: a number is there twice",
        "InferencePool llama does not exist",
    ]
