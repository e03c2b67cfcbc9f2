"""An InferencePool and its pods, from the API server to endpoints."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.identity import EndpointId
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.pool_view import Member, PoolView
from sidecar.pool_watch.views import PoolSpec
from sidecar.pool_watch.watch import PoolWatch
from tests.integration.kube.rig import FAST, add_pod, delete_pod, open_access, running, set_status
from tests.kube import kinds
from tests.kube.notice import Notice
from tests.kube.server import KubeServer


def pool(*ports: int, app: str = "llama", name: str = "llama") -> dict[str, Any]:
    spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name}, "spec": spec}


class Watched:
    """A pool watch, and the endpoints it has told."""

    def __init__(self, access: KubeAccess, **more: Any) -> None:
        self.members: dict[EndpointId, Member] = {}
        self.log: list[str] = []
        self.notice = Notice()
        self.view = PoolView(self._put, self._remove)
        self.watch = PoolWatch(
            access, self.view, namespace="default", rules=FAST, rng=random.Random(0), **more
        )

    def _put(self, member: Member) -> None:
        self.members[member.row.id] = member
        self.log.append(f"{'drain' if member.draining else 'put'} {member.row.id} {member.row.serving}")
        self.notice.tell()

    def _remove(self, endpoint: EndpointId) -> None:
        del self.members[endpoint]
        self.log.append(f"remove {endpoint}")
        self.notice.tell()

    async def until(self, *wanted: str) -> None:
        """Until these endpoints, and no others, are not draining."""
        await self.notice.until(
            lambda: {str(e) for e, m in self.members.items() if not m.draining} == set(wanted)
        )


Watching = Callable[..., Any]


@pytest.fixture
def watching(kube: KubeServer, tmp_path: Path) -> Watching:
    @asynccontextmanager
    async def start(**more: Any) -> AsyncIterator[Watched]:
        async with open_access(kube, tmp_path) as access:
            watched = Watched(access, **(more or {"name": "llama"}))
            async with running(watched.watch.run()):
                yield watched

    return start


def update_pool(kube: KubeServer, body: dict[str, Any]) -> None:
    kube.store.update(kinds.INFERENCE_POOLS, "default", body["metadata"]["name"], body)


async def test_a_pool_with_two_ranks(kube: KubeServer, watching: Watching) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000, 8001))
    add_pod(kube, "a", "10.0.0.1", labels={"llm-d.ai/role": "prefill"})
    add_pod(kube, "b", "10.0.0.2", ready=False)
    add_pod(kube, "c", "10.0.0.3", app="else")
    async with watching() as watched:
        await watched.watch.loaded.wait()
        assert watched.log == ["put a/0 10.0.0.1:8000", "put a/1 10.0.0.1:8001"]
        assert watched.members[EndpointId("a", 0)].row.labels["llm-d.ai/role"] == "prefill"
        set_status(kube, "b", "10.0.0.2")
        await watched.until("a/0", "a/1", "b/0", "b/1")
        kube.store.delete(kinds.PODS.key, "default", "a")  # gracefully: the kubelet has to end it
        await watched.until("b/0", "b/1")
        assert watched.members[EndpointId("a", 0)].draining
        delete_pod(kube, "a")
        await watched.notice.until(lambda: len(watched.members) == 2)
        assert watched.log[-2:] == ["remove a/0", "remove a/1"]
        assert watched.watch.problem is None
        assert [status.synced for status in watched.watch.statuses] == [True, True]


async def test_the_pool_object_is_asked_for_by_name_only(kube: KubeServer, watching: Watching) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    async with watching() as watched:
        await watched.watch.loaded.wait()
        asked = [seen.query for seen in kube.requests if seen.plural == "inferencepools"]
        assert {query["fieldSelector"] for query in asked} == {"metadata.name=llama"}
        assert {s.query["labelSelector"] for s in kube.requests if s.plural == "pods"} == {"app=llama"}


async def test_another_selector_takes_over_when_its_pods_are_known(
    kube: KubeServer, watching: Watching
) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    add_pod(kube, "a", "10.0.0.1")
    add_pod(kube, "b", "10.0.0.2", app="new")
    async with watching() as watched:
        await watched.until("a/0")
        await kube.until_watched("pods")
        held = kube.faults.hold(verb="list", plural="pods")
        update_pool(kube, pool(9000, app="new"))
        await held.reached()
        assert watched.log == ["put a/0 10.0.0.1:8000"]  # still the last known state, on its own port
        held.stop()
        await watched.until("b/0")
        assert watched.log[1:] == ["remove a/0", "put b/0 10.0.0.2:9000"]
        await kube.until_watched("pods", 2)
        await kube.notice.until(lambda: sum(w.table.kind.plural == "pods" for w in kube.watches) == 1)


async def test_a_pool_that_comes_late_goes_and_comes_back(kube: KubeServer, watching: Watching) -> None:
    add_pod(kube, "a", "10.0.0.1")
    async with watching() as watched:
        await kube.until_watched("inferencepools")
        assert not watched.watch.loaded.is_set()
        assert watched.watch.problem == "InferencePool llama does not exist"
        kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
        await watched.until("a/0")
        kube.store.delete(kinds.INFERENCE_POOLS, "default", "llama")
        await watched.until()
        kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8001))
        await watched.until("a/0")
        assert watched.log[-1] == "put a/0 10.0.0.1:8001"


async def test_an_invalid_change_keeps_the_last_good_pool(kube: KubeServer, watching: Watching) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    add_pod(kube, "a", "10.0.0.1")
    async with watching() as watched:
        await watched.until("a/0")
        update_pool(kube, pool(8000, 8000))
        add_pod(kube, "b", "10.0.0.2")
        await watched.until("a/0", "b/0")
        update_pool(kube, pool(8000, 8001))
        await watched.until("a/0", "a/1", "b/0", "b/1")


@pytest.mark.parametrize("how", ["drop", "expire", "end", "compacted"])
async def test_whatever_happens_to_the_watches_the_endpoints_are_right_in_the_end(
    kube: KubeServer, watching: Watching, how: str
) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    add_pod(kube, "gone", "10.0.0.1")
    add_pod(kube, "stays", "10.0.0.2")
    async with watching() as watched:
        await watched.until("gone/0", "stays/0")
        watch = await kube.until_watched("pods")
        held = kube.faults.hold(verb="watch", plural="pods")
        {"drop": watch.drop, "expire": watch.expire}.get(how, watch.end)()
        await kube.notice.until(lambda: watch not in kube.watches)
        delete_pod(kube, "gone")
        add_pod(kube, "new", "10.0.0.1")  # at the same address
        if how == "compacted":
            kube.store.table(kinds.PODS.key).compact()
        held.stop()
        await watched.until("new/0", "stays/0")
        assert watched.log[2:] == ["remove gone/0", "put new/0 10.0.0.1:8000"]


async def test_without_an_inference_pool(kube: KubeServer, watching: Watching) -> None:
    """Standalone: selector and ports are given, and nobody has to be allowed to read pools."""
    add_pod(kube, "a", "fd00::1")
    async with watching(spec=PoolSpec({"app": "llama"}, (8000,))) as watched:
        await watched.until("a/0")
        assert watched.log == ["put a/0 [fd00::1]:8000"]
        assert kube.count("list", "inferencepools") == 0


async def test_churn_over_the_wire_leaves_nothing(kube: KubeServer, watching: Watching) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    async with watching() as watched:
        await kube.until_watched("pods")
        for number in range(1000):
            add_pod(kube, f"p{number}", f"10.0.{number % 7}.1")
            delete_pod(kube, f"p{number}")
            if number % 100 == 99:  # let the watch tell of them: its log holds a thousand changes
                add_pod(kube, "mark", "10.0.8.8")
                await watched.until("mark/0")
                delete_pod(kube, "mark")
                await watched.until()
        assert kube.count("list", "pods") == 1
        add_pod(kube, "last", "10.0.9.9")
        await watched.until("last/0")
        assert list(map(str, watched.members)) == ["last/0"]
        assert watched.view.pods == 1
        assert (
            sum(line.startswith("put") for line in watched.log)
            == sum(line.startswith("remove") for line in watched.log) + 1
        )


OLDER = "inference.networking.x-k8s.io"


def serve_the_older_pool(kube: KubeServer) -> None:
    """InferencePool v1alpha2 as gateways had it before v1, and one that would select other pods."""
    names = {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"}
    spec = {"group": OLDER, "scope": "Namespaced", "names": names}
    spec["versions"] = [{"name": "v1alpha2", "served": True, "storage": True}]
    kube.store.create(kinds.CRDS.key, "", {"metadata": {"name": f"inferencepools.{OLDER}"}, "spec": spec})
    old = {"selector": {"app": "old"}, "targetPortNumber": 9999, "extensionRef": {"name": "epp"}}
    key = (OLDER, "v1alpha2", "inferencepools")
    kube.store.create(key, "default", {"metadata": {"name": "llama"}, "spec": old})
    add_pod(kube, "old", "10.0.0.9", app="old")


async def test_where_both_versions_are_served_only_v1_is_read(kube: KubeServer, watching: Watching) -> None:
    """S-G03: a cluster in the middle of its migration."""
    serve_the_older_pool(kube)
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    add_pod(kube, "a", "10.0.0.1")
    async with watching() as watched:
        await watched.until("a/0")
        assert watched.log == ["put a/0 10.0.0.1:8000"]
        assert watched.watch.problem is None
    assert not [call for call in kube.requests if OLDER in str(call)]


async def test_the_older_group_has_no_v1_and_that_is_said(kube: KubeServer, watching: Watching) -> None:
    """S-G03: `--pool-group` of an old installation. Nothing is guessed from an object of another form."""
    serve_the_older_pool(kube)
    async with watching(group=OLDER) as watched:
        await kube.notice.until(lambda: kube.count("list", "inferencepools") == 2)
        assert "does not serve v1 of this kind" in str(watched.watch.problem)
        assert watched.members == {}


async def test_a_cluster_without_the_crd_is_told_and_waited_for(kube: KubeServer, watching: Watching) -> None:
    """S-G03: the kind comes with an installation that may be late, and may have been of an older one."""
    key, name = kinds.CRDS.key, "inferencepools.inference.networking.k8s.io"
    crd = kube.store.get(key, "", name)
    kube.store.delete(key, "", name)
    serve_the_older_pool(kube)
    add_pod(kube, "a", "10.0.0.1")
    async with watching() as watched:
        await kube.notice.until(lambda: kube.count("list", "inferencepools") == 3)
        assert watched.watch.problem == (
            "list inferencepools.inference.networking.k8s.io in namespace default: the server does not serve "
            "v1 of this kind (is its CRD installed, in that version?)"
        )
        assert watched.members == {}
        approved = crd["metadata"]["annotations"]
        again = {"metadata": {"name": name, "annotations": approved}, "spec": crd["spec"]}
        kube.store.create(key, "", again)
        kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
        await watched.until("a/0")
