"""Two pickers as processes under the chart's account, with the cluster's Leases between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.app.test_picker_process import until
from tests.integration.app.test_replicas_process import alone, both_known, end, health, ready, replica
from tests.integration.cluster.test_kubectl import POOL
from tests.integration.cluster.test_picker import rights
from tests.kube.cluster import Cluster


async def account(cluster: Cluster) -> tuple[Path, tuple[str, ...]]:
    """Kubeconfig of the account that the chart makes for several replicas, and where its pool is."""
    await cluster.apply(*rights(cluster.namespace, replicas=2))
    await cluster.apply(POOL)
    kubeconfig = await cluster.account_kubeconfig("kv-epp")
    return kubeconfig, ("--pool-name", "llama", "--pool-namespace", cluster.namespace)


async def leases(cluster: Cluster) -> dict[str, str | None]:
    """Holder of every Lease."""
    items = json.loads(await cluster.kubectl.run("get", "leases", "-o", "json"))["items"]
    return {item["metadata"]["name"]: item["spec"].get("holderIdentity") for item in items}


@pytest.mark.timeout(240)
async def test_active_active_counts_who_is_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig, where = await account(cluster)
    async with (
        replica(tmp_path, "one", kubeconfig, "active-active", monkeypatch, where) as one,
        replica(tmp_path, "two", kubeconfig, "active-active", monkeypatch, where) as two,
    ):
        for picker in (one, two):
            await until(lambda picker=picker: both_known(picker))  # type: ignore[misc]
            assert await ready(picker)
        assert set(await leases(cluster)) == {"kvpull-epp-one", "kvpull-epp-two"}
        await end(one)
        await until(lambda: alone(two))
        await end(two)
    assert await leases(cluster) == {}, "who leaves takes its Lease along"


@pytest.mark.timeout(240)
async def test_active_passive_hands_over_at_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig, where = await account(cluster)
    async with (
        replica(tmp_path, "one", kubeconfig, "active-passive", monkeypatch, where) as one,
        replica(tmp_path, "two", kubeconfig, "active-passive", monkeypatch, where) as two,
    ):
        await until(lambda: ready(one))
        assert not await ready(two)
        assert await health(two, "liveness"), "a kubelet must not restart the one that waits"
        assert await leases(cluster) == {"kvpull-epp": "one"}
        await end(one)
        await until(lambda: ready(two))
        assert await leases(cluster) == {"kvpull-epp": "two"}
        await end(two)
