"""What kubectl does with a cluster's objects. In the double this keeps the double honest: the same tests
pass in a real cluster.
"""

from __future__ import annotations

import asyncio
import json

from tests.kube.cluster import Cluster
from tests.kube.notice import BOUND_S

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


async def test_apply_creates_changes_and_removes_what_the_manifest_says(cluster: Cluster) -> None:
    assert await cluster.apply(CONFIG_MAP) == "configmap/settings created\n"
    assert await cluster.apply(CONFIG_MAP) == "configmap/settings unchanged\n"
    changed = CONFIG_MAP.replace("a: 1", "a: 3").replace(', two.yaml: "b: 2"', "")
    assert await cluster.apply(changed) == "configmap/settings configured\n"
    assert (await cluster.get("cm", "settings"))["data"] == {"one.yaml": "a: 3"}


async def test_server_side_apply_owns_fields_and_refuses_those_of_others(cluster: Cluster) -> None:
    flags = ("--server-side",)
    assert "serverside-applied" in await cluster.apply(CONFIG_MAP, flags=flags)
    without = CONFIG_MAP.replace(', two.yaml: "b: 2"', "")
    assert "serverside-applied" in await cluster.apply(without, flags=flags)
    assert (await cluster.get("cm", "settings"))["data"] == {"one.yaml": "a: 1"}
    other = without.replace("a: 1", "a: 9")
    arguments = ("apply", "--server-side", "--field-manager", "other", "-f", "-")
    assert "conflict" in await cluster.kubectl.run(*arguments, stdin=other, code=1)
    await cluster.kubectl.run(*arguments, "--force-conflicts", stdin=other)
    assert (await cluster.get("cm", "settings"))["data"] == {"one.yaml": "a: 9"}


async def test_custom_resources_are_created_and_checked(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    created = await kubectl.run("create", "-f", "-", stdin=POOL)
    assert "inferencepool.inference.networking.k8s.io/llama created" in created
    assert "llama" in await kubectl.run("get", "infpool")
    wrong = POOL.replace("number: 8000", "number: 70000").replace("FailOpen", "Never")
    told = await kubectl.run("apply", "-f", "-", stdin=wrong, code=1)
    assert "spec.targetPorts[0].number" in told
    assert "spec.endpointPickerRef.failureMode" in told
    assert (await cluster.get("infpool", "llama"))["spec"]["targetPorts"][0] == {"number": 8000}


async def test_labels_select_and_deletion_is_seen(cluster: Cluster) -> None:
    await cluster.apply(CONFIG_MAP)
    assert "settings" in await cluster.kubectl.run("get", "cm", "-l", "team in (a,b)", "-o", "name")
    assert await cluster.kubectl.run("get", "cm", "-l", "team=b", "-o", "name") == ""
    assert 'configmap "settings" deleted' in await cluster.kubectl.run("delete", "cm", "settings")
    assert "NotFound" in await cluster.kubectl.run("get", "cm", "settings", code=1)


async def test_watch_tells_of_changes(cluster: Cluster) -> None:
    await cluster.apply(CONFIG_MAP)
    command = ("get", "cm", "settings", "-w", "-o", "json", "--output-watch-events")
    process = await cluster.kubectl.start(*command)
    assert process.stdout is not None
    decoder, text, events = json.JSONDecoder(), "", list[tuple[str, str]]()
    async with asyncio.timeout(BOUND_S):
        while len(events) < 3:
            text = (text + (await process.stdout.read(1 << 16)).decode()).lstrip()
            try:
                event, end = decoder.raw_decode(text)
            except ValueError:
                continue
            text = text[end:].lstrip()
            events.append((event["type"], event["object"]["data"]["one.yaml"]))
            if len(events) == 1:
                await cluster.apply(CONFIG_MAP.replace("a: 1", "a: 7"))
            elif len(events) == 2:
                await cluster.kubectl.run("delete", "cm", "settings")
        process.terminate()
        await process.communicate()
    assert events == [("ADDED", "a: 1"), ("MODIFIED", "a: 7"), ("DELETED", "a: 7")]


async def test_a_pod_with_a_finalizer_ends_when_it_is_let_go(cluster: Cluster) -> None:
    await cluster.put_pod("p", "192.0.2.1", finalizers=["test.kvpull/hold"])
    await cluster.kubectl.run("delete", "pod", "p", "--wait=false")
    found = await cluster.get("pod", "p")
    assert found["metadata"]["deletionTimestamp"]
    assert found["status"]["podIP"] == "192.0.2.1"
    await cluster.kubectl.run("patch", "pod", "p", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    assert "NotFound" in await cluster.kubectl.run("get", "pod", "p", code=1)
