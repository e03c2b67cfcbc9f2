"""The chart's own pod as a process: its arguments, files, keys and ServiceAccount; thresholds by kubectl.

helm, kubectl, the picker, engines and the bytes that move are real; the API server is our double. The only
changes to the rendered arguments are ports (any free ones) and where the pod's volumes are on this disk.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.telemetry import Telemetry
from tests.integration.app.test_cluster_process import PORTS
from tests.integration.app.test_picker_process import (
    ANY_PORTS,
    Picker,
    pull,
    running_picker,
    until,
    until_usable,
)
from tests.integration.engine.rig import BLOCK, BOUND_S, TOKENIZER, EngineClient, StartEngine, prompt_ids
from tests.integration.kube.rig import add_pod
from tests.kube import chart, kinds
from tests.kube.kubectl import Kubectl
from tests.kube.rbac import ADMIN
from tests.kube.server import KubeServer

VALUES = chart.merged(
    chart.MINIMAL,
    {
        # the emulated engines have no render endpoint: tokens in the picker's own process
        "router": {"tokenizer": {"local": {"path": str(TOKENIZER)}}, "epp": {"lameDuckSeconds": 0}},
        "thresholds": {"spec": {"default": {"minCachedTokenDelta": 64}}},
    },
)
# of engines, not of the picker: vLLM's and our plugin's
ENGINE_METRIC = re.compile(r"vllm:|kvpull_(pulls?|peer)_")
_ROW = re.compile(r"^# HELP (\S+)", re.MULTILINE)


async def install(kube: KubeServer, helm: Kubectl, values: dict[str, Any]) -> None:
    command = ("install", "kv", str(chart.CHART), "-f", "-", "--disable-openapi-validation")
    await helm.run(*command, stdin=json.dumps(values))
    kube.authority.anonymous = ADMIN  # kubectl and helm


def volume_files(kube: KubeServer, volume: dict[str, Any]) -> dict[str, bytes]:
    """What a kubelet would put into a volume."""
    if "configMap" in volume:
        data = kube.store.get(kinds.CONFIG_MAPS.key, "default", volume["configMap"]["name"])["data"]
        return {name: text.encode() for name, text in data.items()}
    if "secret" in volume:
        data = kube.store.get(("", "v1", "secrets"), "default", volume["secret"]["secretName"])["data"]
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
        return {item["path"]: base64.b64decode(data[item["key"]]) for item in items}
    return {}


def localise(kube: KubeServer, folder: Path, pod: dict[str, Any]) -> list[str]:
    """The picker's arguments with its volumes written below `folder`."""
    container = next(c for c in pod["containers"] if c["name"] == "epp")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {}
    for mount in container["volumeMounts"]:
        place = folder / mount["name"]
        for name, content in volume_files(kube, volumes[mount["name"]]).items():
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
            places[mount["mountPath"]] = str(place)
    mounted = re.compile("=(" + "|".join(sorted(places, key=len, reverse=True)) + ")(?=/|$)")
    here = [mounted.sub(lambda match: f"={places[match[1]]}", a, count=1) for a in container["args"]]
    return [*here, *ANY_PORTS]


def account_kubeconfig(kube: KubeServer, folder: Path, pod: dict[str, Any]) -> Path:
    """What the pod's ServiceAccount token would give it."""
    kube.authority.tokens["pod"] = f"system:serviceaccount:default:{pod['serviceAccountName']}"
    return kube.write_kubeconfig(folder / "pod-kubeconfig", token="pod")


def granted(kube: KubeServer) -> set[tuple[str, str]]:
    rules = kube.store.get(kinds.ROLES.key, "default", "kv-epp")["rules"]
    return {(verb, plural) for r in rules for verb in r["verbs"] for plural in r["resources"]}


async def change_thresholds(kubectl: Kubectl, picker: Picker) -> None:
    """Off, and on again with another figure: in force without a restart."""

    async def generation(wanted: int) -> bool:
        return bool((await picker.debug("thresholds"))["generation"] == wanted)

    for number, default in enumerate(("{enabled: false}", "{minCachedTokenDelta: 4096}"), start=2):
        document = f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec: {{default: {default}}}\n"
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kv-epp-thresholds"}}
        manifest = json.dumps(config_map | {"data": {"pull.yaml": document}})
        # helm owns the document where thresholds.spec is set: taking it over has to be said
        command = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        await kubectl.run(*command, stdin=manifest)
        await until(lambda number=number: generation(number))  # type: ignore[misc]
    routed = await picker.ask(prompt_ids(BLOCK), "changed")
    said = await picker.debug("decisions/changed")
    assert (said["min_cached_token_delta"], said["threshold_generation"]) == (4096, 3)
    await routed.end()


async def refuse_a_document(kube: KubeServer, kubectl: Kubectl, picker: Picker) -> None:
    """An Event, for which there is a right."""
    data = json.dumps({"data": {"pull.yaml": "kind: [broken"}})
    await kubectl.run("patch", "configmap", "kv-epp-thresholds", "--type=merge", "-p", data)
    await kube.notice.until(lambda: bool(kube.store.table(kinds.EVENTS.key).objects))
    assert (await picker.debug("thresholds"))["generation"] == 3


def asked(kube: KubeServer) -> set[tuple[str, str]]:
    """What the pod's ServiceAccount asked for."""
    return {(seen.verb, seen.plural) for seen in kube.requests if seen.user.endswith(":kv-epp")}


async def end(picker: Picker) -> None:
    picker.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(BOUND_S):
        assert await picker.process.wait() == 0


async def metric_names(picker: Picker) -> set[str]:
    async with picker.session.get(f"http://127.0.0.1:{picker.ports['metrics_port']}/metrics") as response:
        return set(_ROW.findall(await response.text()))


def queried() -> set[str]:
    """Metrics that the dashboard and the alerts ask for, without a histogram's endings."""
    files = chart.CHART / "files"
    dashboard = json.loads((files / "dashboard.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    alerts = yaml.safe_load((files / "alerts.yaml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    found = set(re.findall(r"\b(?:kvpull|llm_d|vllm)[a-z0-9_:]*", " ".join(expressions)))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


@pytest.mark.timeout(240)
async def test_the_rendered_pod_serves_pulls_and_obeys_kubectl(
    start_engine: StartEngine, kube: KubeServer, kubectl: Kubectl, helm: Kubectl, tmp_path: Path
) -> None:
    await install(kube, helm, VALUES)
    deployment = kube.store.get(("apps", "v1", "deployments"), "default", "kv-epp")
    pod = deployment["spec"]["template"]["spec"]
    engines: dict[str, EngineClient] = {}
    for name in ("a", "b"):
        engines[name] = await start_engine(name=name, **PORTS)
        add_pod(kube, name, engines[name].host)
    arguments = localise(kube, tmp_path, pod)
    token = (tmp_path / "keys" / "debug-token").read_text()
    kubeconfig = account_kubeconfig(kube, tmp_path, pod)
    async with running_picker(arguments, kubeconfig, token=token) as picker:
        await until_usable(picker, engines)
        for routed in await pull(picker, engines):
            assert "x-kvpull-routing-auth" in routed.headers  # the Secret's key signs them
            await routed.end()
        await change_thresholds(kubectl, picker)
        await refuse_a_document(kube, kubectl, picker)
        exported = await metric_names(picker)
        await end(picker)
    assert asked(kube) == granted(kube)  # neither more nor less: S-G01
    sidecar = {f.name + ("_total" if f.type == "counter" else "") for f in Telemetry().registry.collect()}
    unknown = {name for name in queried() - exported - sidecar if not ENGINE_METRIC.match(name)}
    assert unknown == set()


@pytest.mark.timeout(240)
async def test_a_picker_takes_its_siblings_snapshot_with_the_chart_s_certificate(
    start_engine: StartEngine, kube: KubeServer, helm: Kubectl, tmp_path: Path
) -> None:
    """Two pods of one Deployment; the headless Service's name is played by the first one's address."""
    await install(kube, helm, chart.merged(VALUES, {"router": {"epp": {"replicas": 2}}}))
    pod = kube.store.get(("apps", "v1", "deployments"), "default", "kv-epp")["spec"]["template"]["spec"]
    engine = await start_engine(name="a", **PORTS)
    add_pod(kube, "a", engine.host)
    kubeconfig = account_kubeconfig(kube, tmp_path, pod)
    arguments = localise(kube, tmp_path, pod)
    token = (tmp_path / "keys" / "debug-token").read_text()
    alone = [*(a for a in arguments if not a.startswith("--sibling=")), "--snapshot-port", "0"]
    async with running_picker(alone, kubeconfig, token=token, environment={"POD_NAME": "one"}) as first:

        async def known() -> bool:
            return any(row["blocks_cpu"] >= 4 for row in await first.debug("endpoints"))

        async def both() -> bool:
            return await first.metric("kvpull_epp_replicas") == 2

        await engine.complete(prompt_ids(4 * BLOCK))
        await until(known)
        sibling = f"--sibling=127.0.0.1:{first.ports['snapshot_port']}"
        others = [*(sibling if a.startswith("--sibling=") else a for a in arguments), "--snapshot-port", "0"]
        named = {"POD_NAME": "two"}
        async with running_picker(others, kubeconfig, token=token, environment=named) as second:
            assert await second.metric('kvpull_epp_snapshot_fetch_info{outcome="complete"}') == 1
            assert await first.metric('kvpull_epp_snapshot_sent_rows_total{outcome="sent"}') == 1
            await until(both)
            await kube.notice.until(lambda: ("update", "leases") in asked(kube))  # its Lease is renewed
            await end(second)
        await end(first)
    assert asked(kube) | {("create", "events")} == granted(kube)
