"""The picker's process in a cluster: its pool from the API server, thresholds by the real kubectl.

The API server is our double; kubectl, engines, gRPC and the bytes that move are real.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.app.test_picker_process import (
    CONFIG,
    ROOT,
    Picker,
    picker_process,
    pull,
    until,
    until_usable,
)
from tests.integration.engine.rig import BLOCK, BOUND_S, EngineClient, StartEngine, prompt_ids
from tests.integration.kube.rig import add_pod, delete_pod
from tests.integration.kube.test_page import RBAC
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.rbac import ADMIN
from tests.kube.server import KubeServer

PORTS = {"port": 8000, "events_port": 5557, "replay_port": 5657, "p2p_port": 7777}
POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llama}
spec:
  selector: {matchLabels: {app: llama}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: epp, port: {number: 9002}, failureMode: FailOpen}
"""
FLAGS = ("--pool-name", "llama", "--pool-namespace", "default", "--thresholds-configmap", "pulls")


def thresholds(default: str) -> str:
    text = f"apiVersion: kvpull/v1alpha1\\nkind: PullThresholds\\nspec: {{default: {default}}}\\n"
    return f'apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: pulls}}\ndata: {{pull.yaml: "{text}"}}\n'


async def apply(kubectl: Kubectl, manifest: str) -> None:
    await kubectl.run("apply", "-f", "-", stdin=manifest)


async def set_up(kube: KubeServer, kubectl: Kubectl, folder: Path) -> Path:
    """The picker's rights and its pool; the kubeconfig of its ServiceAccount."""
    await apply(kubectl, RBAC)
    await apply(kubectl, POOL)
    await apply(kubectl, thresholds("{minCachedTokenDelta: 64}"))
    kube.authority.anonymous = ADMIN  # kubectl
    kube.authority.tokens["t"] = "system:serviceaccount:default:kvpull-epp"
    return kube.write_kubeconfig(folder / "picker-kubeconfig", token="t")


async def change_thresholds(kube: KubeServer, kubectl: Kubectl, picker: Picker) -> None:
    async def generation_2() -> bool:
        return bool((await picker.debug("thresholds"))["generation"] == 2)

    async def refused() -> bool:
        return bool((await picker.debug("thresholds"))["rejected"])

    await apply(kubectl, thresholds("{enabled: false}"))
    await until(generation_2)
    routed = await picker.ask(prompt_ids(BLOCK), "off")
    said = await picker.debug("decisions/off")
    assert (said["reason"], said["threshold_generation"]) == ("switched_off", 2)
    await routed.end()
    await apply(kubectl, thresholds("{enabled: perhaps}"))
    await until(refused)
    assert await picker.metric("kvpull_epp_threshold_generation") == 2
    await kube.notice.until(lambda: bool(kube.store.table(kinds.EVENTS.key).objects))
    told = await kubectl.run(
        "get", "events", "-o", "jsonpath={.items[0].involvedObject.name}: {.items[0].message}"
    )
    assert told.startswith(
        "pulls: not in force, the last good thresholds stay: pulls/pull.yaml: spec.default.enabled"
    )


async def drain_and_lose(kube: KubeServer, kubectl: Kubectl, picker: Picker, left: EngineClient) -> None:
    """A deleted pod takes no more work, and leaves when it is gone."""

    async def rows() -> dict[str, Any]:
        return {row["pod"]: row for row in await picker.debug("endpoints")}

    async def draining() -> bool:
        return bool((await rows())["a"]["draining"])

    async def gone() -> bool:
        return (await rows()).keys() == {"b"}

    await kubectl.run("delete", "pod", "a", "--wait=false")
    await until(draining)
    for number in range(4):
        routed = await picker.ask(prompt_ids(BLOCK, salt=number), f"d{number}")
        assert routed.destination.startswith(left.host)
        await routed.end()
    delete_pod(kube, "a")
    await until(gone)


@pytest.mark.timeout(240)
async def test_pool_thresholds_and_pods_from_the_api_server(
    start_engine: StartEngine, kube: KubeServer, kubectl: Kubectl, tmp_path: Path
) -> None:
    kubeconfig = await set_up(kube, kubectl, tmp_path)
    engines: dict[str, EngineClient] = {}
    for name in ("a", "b"):
        engines[name] = await start_engine(name=name, **PORTS)
        add_pod(kube, name, engines[name].host)
    async with picker_process(tmp_path, [], inputs=FLAGS, kubeconfig=kubeconfig) as picker:
        await until_usable(picker, engines)
        for routed in await pull(picker, engines):
            await routed.end()
        await change_thresholds(kube, kubectl, picker)
        await drain_and_lose(kube, kubectl, picker, engines["b"])
        assert await picker.metric('kvpull_kube_synced{resource="pods"}') == 1
        picker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            assert await picker.process.wait() == 0
    asked = {(s.verb, s.plural) for s in kube.requests if s.user.endswith(":kvpull-epp")}
    readable = {
        (verb, plural)
        for verb in ("list", "watch")
        for plural in (
            "pods",
            "inferencepools",
            "configmaps",
            "inferenceobjectives",
            "inferencemodelrewrites",
        )
    }
    assert asked == readable | {("create", "events")}  # the page grants exactly what is used


async def test_no_api_server_is_a_sentence_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "epp",
            "--config-file",
            str(tmp_path / "config.yaml"),
            "--pool-name",
            "llama",
            "--tokenizer",
            str(ROOT / "config" / "tokenizer"),
        ),
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND_S):
        _, told = await process.communicate()
    assert process.returncode == 2
    assert b"this is not a pod with a ServiceAccount token, and KUBECONFIG is not set" in told
