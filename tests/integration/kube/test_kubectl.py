"""The double is kept honest by the real kubectl: what it cannot speak to, it does not model."""

from __future__ import annotations

import asyncio
import json

from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.notice import BOUND_S
from tests.kube.server import KubeServer

POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llama}
spec:
  selector: {matchLabels: {app: llama}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: epp, port: {number: 9002}, failureMode: FailOpen}
"""
CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, labels: {team: a}}
data: {one.yaml: "a: 1", two.yaml: "b: 2"}
"""


async def test_apply_creates_changes_and_removes_what_the_manifest_says(
    kube: KubeServer, kubectl: Kubectl
) -> None:
    assert await kubectl.run("apply", "-f", "-", stdin=CONFIG_MAP) == "configmap/settings created\n"
    assert await kubectl.run("apply", "-f", "-", stdin=CONFIG_MAP) == "configmap/settings unchanged\n"
    changed = CONFIG_MAP.replace("a: 1", "a: 3").replace(', two.yaml: "b: 2"', "")
    assert await kubectl.run("apply", "-f", "-", stdin=changed) == "configmap/settings configured\n"
    stored = kube.store.get(kinds.CONFIG_MAPS.key, "default", "settings")
    assert stored["data"] == {"one.yaml": "a: 3"}
    assert json.loads(await kubectl.run("get", "cm", "settings", "-o", "json"))["data"] == stored["data"]


async def test_server_side_apply_owns_fields_and_refuses_those_of_others(
    kube: KubeServer, kubectl: Kubectl
) -> None:
    assert "serverside-applied" in await kubectl.run("apply", "--server-side", "-f", "-", stdin=CONFIG_MAP)
    without = CONFIG_MAP.replace(', two.yaml: "b: 2"', "")
    assert "serverside-applied" in await kubectl.run("apply", "--server-side", "-f", "-", stdin=without)
    assert kube.store.get(kinds.CONFIG_MAPS.key, "default", "settings")["data"] == {"one.yaml": "a: 1"}
    other = without.replace("a: 1", "a: 9")
    arguments = ("apply", "--server-side", "--field-manager", "other", "-f", "-")
    assert "conflict" in await kubectl.run(*arguments, stdin=other, code=1)
    await kubectl.run(*arguments, "--force-conflicts", stdin=other)
    assert kube.store.get(kinds.CONFIG_MAPS.key, "default", "settings")["data"] == {"one.yaml": "a: 9"}


async def test_custom_resources_are_created_and_checked(kube: KubeServer, kubectl: Kubectl) -> None:
    assert "inferencepool.inference.networking.k8s.io/llama created" in await kubectl.run(
        "create", "-f", "-", stdin=POOL
    )
    assert "llama" in await kubectl.run("get", "infpool")
    wrong = POOL.replace("number: 8000", "number: 70000").replace("FailOpen", "Never")
    told = await kubectl.run("apply", "-f", "-", stdin=wrong, code=1)
    assert "spec.targetPorts[0].number" in told
    assert "spec.endpointPickerRef.failureMode" in told
    assert kube.store.get(kinds.INFERENCE_POOLS, "default", "llama")["spec"]["targetPorts"][0] == {
        "number": 8000
    }


async def test_labels_select_and_deletion_is_seen(kube: KubeServer, kubectl: Kubectl) -> None:
    await kubectl.run("apply", "-f", "-", stdin=CONFIG_MAP)
    assert "settings" in await kubectl.run("get", "cm", "-l", "team in (a,b)", "-o", "name")
    assert await kubectl.run("get", "cm", "-l", "team=b", "-o", "name") == ""
    assert 'configmap "settings" deleted' in await kubectl.run("delete", "cm", "settings")
    assert "NotFound" in await kubectl.run("get", "cm", "settings", code=1)


async def test_watch_tells_of_changes(kube: KubeServer, kubectl: Kubectl) -> None:
    await kubectl.run("apply", "-f", "-", stdin=CONFIG_MAP)
    process = await kubectl.start("get", "cm", "-w", "-o", "json", "--output-watch-events")
    watch = await kube.until_watched("configmaps")
    changed = json.loads(json.dumps(kube.store.get(kinds.CONFIG_MAPS.key, "default", "settings")))
    changed["data"]["one.yaml"] = "a: 7"
    kube.store.update(kinds.CONFIG_MAPS.key, "default", "settings", changed)
    kube.store.delete(kinds.CONFIG_MAPS.key, "default", "settings")
    watch.end()
    async with asyncio.timeout(BOUND_S):
        out, _ = await process.communicate()  # it ends with its watch
    text, decoder, events = out.decode().strip(), json.JSONDecoder(), []
    while text:
        event, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
        events.append((event["type"], event["object"]["data"]["one.yaml"]))
    assert events == [("ADDED", "a: 1"), ("MODIFIED", "a: 7"), ("DELETED", "a: 7")]


async def test_pods_end_gracefully_unless_forced(kube: KubeServer, kubectl: Kubectl) -> None:
    pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}}
    kube.store.create(kinds.PODS.key, "default", pod)
    await kubectl.run("delete", "pod", "p", "--wait=false")
    assert kube.store.get(kinds.PODS.key, "default", "p")["metadata"]["deletionTimestamp"]
    await kubectl.run("delete", "pod", "p", "--grace-period=0", "--force")
    assert ("default", "p") not in kube.store.table(kinds.PODS.key).objects
