"""A release of the chart from install to uninstall, as helm and kubectl see it."""

from __future__ import annotations

import json
from typing import Any

from tests.kube import chart
from tests.kube.cluster import Cluster

THRESHOLDS = {"thresholds": {"spec": {"default": {"minCachedTokenDelta": 1024}}}}


async def install(cluster: Cluster, verb: str = "install", **more: Any) -> str:
    command = (verb, "kv", str(chart.CHART), "-f", "-", *cluster.helm_flags)
    return await cluster.helm.run(*command, stdin=json.dumps(chart.merged(chart.MINIMAL, more)))


async def template(cluster: Cluster) -> Any:
    return (await cluster.get("deployment", "kv-epp"))["spec"]["template"]


async def test_install_upgrade_rollback_uninstall(cluster: Cluster) -> None:
    await install(cluster, **THRESHOLDS)
    first = await template(cluster)
    thresholds = (await cluster.get("cm", "kv-epp-thresholds"))["data"]
    pool = (await cluster.get("infpool", "kv"))["spec"]
    assert pool["endpointPickerRef"]["name"] == "kv-epp"
    changed = {"thresholds": {"spec": {"default": {"minCachedTokenDelta": 4096}}}}
    await install(cluster, "upgrade", **changed)
    assert (await cluster.get("cm", "kv-epp-thresholds"))["data"] != thresholds
    assert await template(cluster) == first  # nothing rolls
    await install(cluster, "upgrade", router={"epp": {"pluginsConfigFile": "load-first.yaml", "replicas": 3}})
    assert await template(cluster) != first
    assert "ConfigMap/kv-epp-thresholds" not in await cluster.left()
    await cluster.helm.run("rollback", "kv", "1")
    assert await template(cluster) == first
    assert (await cluster.get("cm", "kv-epp-thresholds"))["data"] == thresholds
    history = json.loads(await cluster.helm.run("history", "kv", "-o", "json"))
    assert [(e["revision"], e["status"]) for e in history][-1] == (4, "deployed")
    await cluster.helm.run("uninstall", "kv", "--wait", "--timeout=25s", "--cascade=foreground")
    assert await cluster.left() == set()


async def test_keys_are_made_once(cluster: Cluster) -> None:
    """Another key at an upgrade would cut off every sidecar and engine that has the old one."""
    await install(cluster, router={"epp": {"replicas": 2}})
    keys, certificates = await cluster.secret("kv-keys"), await cluster.secret("kv-epp-sibling-tls")
    assert keys.keys() == {"routing-key", "debug-token", "peer-key", "salt-key"}
    assert {len(key) for key in keys.values()} == {43}
    assert len({*keys.values()}) == 4
    await install(cluster, "upgrade", router={"epp": {"replicas": 3}})
    assert await cluster.secret("kv-keys") == keys
    assert await cluster.secret("kv-epp-sibling-tls") == certificates


async def test_a_config_map_that_was_applied_by_hand_survives_upgrades(cluster: Cluster) -> None:
    """Without thresholds.spec the ConfigMap is the operator's."""
    await install(cluster)
    meta = {"name": "kv-epp-thresholds"}
    applied = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"pull.yaml": "kind: X\n"}}
    await cluster.apply(applied)
    await install(cluster, "upgrade", router={"epp": {"replicas": 2}})
    assert (await cluster.get("cm", "kv-epp-thresholds"))["data"] == applied["data"]


async def test_the_picker_s_account_may_do_what_it_needs_and_no_more(cluster: Cluster) -> None:
    """As itself, with a token that the API server made for it."""
    await install(cluster, router={"epp": {"replicas": 2}})
    picker = cluster.as_account(await cluster.account_kubeconfig("kv-epp"))
    for allowed in ("pods", "infpool", "leases"):
        await picker.run("get", allowed)
    await picker.run("get", "cm", "--field-selector", "metadata.name=kv-epp-thresholds")
    for refused in (
        ("get", "secrets"),
        ("get", "cm"),
        ("get", "pods", "--all-namespaces"),
        ("get", "pods", "--namespace", "kube-system"),
        ("delete", "pod", "kv"),
        ("patch", "infpool", "kv", "--type=merge", "-p", '{"spec":{}}'),
        ("get", "endpointslices"),
    ):
        assert "Forbidden" in await picker.run(*refused, code=1), refused
