"""A running picker, under its ServiceAccount: pods, the pool, and thresholds by kubectl."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.app.test_picker_process import Picker, picker_process, until
from tests.integration.cluster.test_kubectl import POOL
from tests.integration.engine.rig import BLOCK, BOUND_S, prompt_ids
from tests.kube import chart
from tests.kube.cluster import Cluster

ACCOUNT = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "kv-epp"}}


def thresholds(default: str) -> dict[str, Any]:
    text = f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec: {{default: {default}}}\n"
    meta = {"name": "kv-epp-thresholds"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"pull.yaml": text}}


def rights(namespace: str, replicas: int = 1) -> list[dict[str, Any]]:
    """Role and RoleBinding of the chart, for this namespace."""
    manifests = chart.minimal({"router": {"epp": {"replicas": replicas}}})
    role, binding = chart.find(manifests, "Role", "-epp"), chart.find(manifests, "RoleBinding", "-epp")
    for manifest in (role, binding):
        manifest["metadata"] = {"name": manifest["metadata"]["name"]}
    binding["subjects"][0]["namespace"] = namespace
    return [ACCOUNT, role, binding]


async def until_generation(picker: Picker, wanted: int) -> None:
    async def reached() -> bool:
        return bool((await picker.debug("thresholds"))["generation"] == wanted)

    await until(reached)


async def change_thresholds(cluster: Cluster, picker: Picker) -> None:
    """In force while it runs; what cannot be used changes nothing and becomes an Event."""
    await until_generation(picker, 1)
    await cluster.apply(thresholds("{enabled: false}"))
    await until_generation(picker, 2)
    routed = await picker.ask(prompt_ids(BLOCK), "off")
    said = await picker.debug("decisions/off")
    assert (said["reason"], said["threshold_generation"]) == ("switched_off", 2)
    await routed.end()
    await cluster.apply(thresholds("{enabled: perhaps}"))

    async def told() -> bool:
        template = "jsonpath={range .items[*]}{.involvedObject.name}: {.message}{end}"
        found = await cluster.kubectl.run("get", "events", "-o", template)
        return "kv-epp-thresholds: not in force, the last good thresholds stay" in found

    await until(told)
    assert (await picker.debug("thresholds"))["generation"] == 2


async def lose_a_pod(cluster: Cluster, picker: Picker) -> None:
    """A deleted pod takes no more work, and leaves when it is gone."""

    async def state(**wanted: bool) -> bool:
        rows = {row["pod"]: row["draining"] for row in await picker.debug("endpoints")}
        return bool(rows == wanted)

    await cluster.kubectl.run("delete", "pod", "a", "--wait=false")
    await until(lambda: state(a=True, b=False))
    for number in range(4):
        routed = await picker.ask(prompt_ids(BLOCK, salt=number), f"d{number}")
        assert routed.destination.startswith("192.0.2.2:")
        await routed.end()
    await cluster.kubectl.run("patch", "pod", "a", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    await until(lambda: state(b=False))


@pytest.mark.timeout(240)
async def test_a_picker_follows_pods_and_kubectl(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.apply(*rights(cluster.namespace))
    await cluster.apply(POOL.replace(", {number: 8001}", ""), thresholds("{minCachedTokenDelta: 64}"))
    await cluster.put_pod("a", "192.0.2.1", finalizers=["test.kvpull/hold"])
    await cluster.put_pod("b", "192.0.2.2")
    kubeconfig = await cluster.account_kubeconfig("kv-epp")
    inputs = ("--pool-name", "llama", "--pool-namespace", cluster.namespace)
    inputs += ("--thresholds-configmap", "kv-epp-thresholds")
    async with picker_process(tmp_path, [], inputs=inputs, kubeconfig=kubeconfig) as picker:

        async def both() -> bool:
            return {row["pod"] for row in await picker.debug("endpoints")} == {"a", "b"}

        await until(both)
        await change_thresholds(cluster, picker)
        await lose_a_pod(cluster, picker)
        picker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            assert await picker.process.wait() == 0
