"""`make bench NAME=kubernetes`: what it costs to know 5,000 pods.

The API double runs in a process of its own, with pods as large as real ones (about 4 kB). A second process
imports what the picker needs, opens the configuration, then watches the pool until it is in sync. Memory is
what that adds to the process after the imports; time is the sync less what the double takes to answer the
same pages to somebody who only reads bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PODS = 5000
ROUNDS = 5


def pod(number: int) -> dict[str, Any]:
    """As a Deployment's pod of an engine with a sidecar: most of it is nothing to us."""
    name = f"llama-decode-6f7c9d5b8-{number:05}"
    ip = f"10.{number // 60000}.{number // 250 % 250}.{number % 250 + 1}"
    container = {
        "name": "engine",
        "image": "registry.example/vllm/vllm-openai:v0.32.0",
        "args": ["--model", "meta-llama/Llama-3.3-70B-Instruct", "--tensor-parallel-size", "4"],
        "env": [{"name": f"SETTING_{n}", "value": f"value-{n}"} for n in range(12)],
        "resources": {"limits": {"nvidia.com/gpu": "4", "memory": "400Gi"}},
        "volumeMounts": [{"name": f"v{n}", "mountPath": f"/mnt/{n}"} for n in range(6)],
    }
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    statuses = [{"name": n, "ready": True, "restartCount": 0, "state": state} for n in ("engine", "sidecar")]
    labels = {
        "app": "llama",
        "llm-d.ai/role": "decode",
        "pod-template-hash": "6f7c9d5b8",
        "zone": f"z{number % 3}",
    }
    owned = {"f:metadata": {"f:labels": {f"f:{key}": {} for key in labels}}, "f:spec": {"f:containers": {}}}
    managed = [{"manager": m, "operation": "Update", "fieldsV1": owned} for m in ("controller", "kubelet")]
    return {
        "metadata": {"name": name, "labels": labels, "managedFields": managed},
        "spec": {"nodeName": f"n{number % 600}", "containers": [container, container | {"name": "sidecar"}]},
        "status": {"phase": "Running", "podIP": ip, "conditions": conditions, "containerStatuses": statuses},
    }


async def serve() -> None:
    """The double, until its standard input ends."""
    from tests.kube import kinds
    from tests.kube.server import kube_server

    async with kube_server(log_size=PODS) as kube:
        spec = {"selector": {"matchLabels": {"app": "llama"}}, "targetPorts": [{"number": 8000}]}
        kube.store.create(kinds.INFERENCE_POOLS, "default", {"metadata": {"name": "llama"}, "spec": spec})
        for number in range(PODS):
            kube.store.create(kinds.PODS.key, "default", pod(number))
        print(kube.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def measure(url: str) -> dict[str, float]:
    from sidecar.pool_watch.access import Environment, KubeAccess

    with TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {}}]
        config = {"clusters": [cluster], "users": users, "contexts": [context], "current-context": "x"}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
        access = KubeAccess(Environment({"KUBECONFIG": str(path)}))
        await access.open()
        try:
            return await _rounds(access)
        finally:
            await access.close()


async def _rounds(access: Any) -> dict[str, float]:
    await _raw_s(access, pages=1)  # the connection
    gc.collect()
    before_mb = _rss_mb()
    first = _Sync(access)
    await first.run()
    gc.collect()
    added_mb = _rss_mb() - before_mb
    assert len(first.view.members) == PODS
    syncs, raws = [], []
    for _ in range(ROUNDS):
        raws.append(await _raw_s(access))
        again = _Sync(access)
        await again.run()
        syncs.append(again.took_s)
    sync_s, raw_s = min(syncs), min(raws)  # the least disturbed of each
    return {"added_mb": added_mb, "sync_s": sync_s, "raw_s": raw_s, "peak_mb": _rss_mb("VmHWM") - before_mb}


class _Sync:
    """One pool watch, from nothing to in sync."""

    def __init__(self, access: Any) -> None:
        from sidecar.pool_watch.pool_view import PoolView
        from sidecar.pool_watch.watch import PoolWatch

        self.view = PoolView(lambda member: None, lambda endpoint: None)
        self._watch = PoolWatch(access, self.view, namespace="default", name="llama")
        self.took_s = 0.0

    async def run(self) -> None:
        started_s = time.perf_counter()
        task = asyncio.create_task(self._watch.run())
        await self._watch.loaded.wait()
        self.took_s = time.perf_counter() - started_s
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _raw_s(access: Any, *, pages: int = PODS) -> float:
    """Seconds to read the bytes of the same pages, nothing of them parsed but the page token."""
    from sidecar.pool_watch.reflector import WatchRules
    from sidecar.pool_watch.resources import PODS as RESOURCE
    from sidecar.pool_watch.resources import Call

    started_s, token = time.perf_counter(), ""
    for _ in range(pages):
        query = {"labelSelector": "app=llama", "limit": str(WatchRules().page_objects)}
        query |= {"continue": token} if token else {}
        async with access.request(Call("list", RESOURCE, "default", query=query)) as response:
            raw = await response.read()
        token = _token(raw)
        if not token:
            break
    return time.perf_counter() - started_s


def _token(raw: bytes) -> str:
    start = raw.find(b'"continue":', 0, 2000)
    if start < 0:
        return ""
    text, _ = json.JSONDecoder().raw_decode(raw[start + len(b'"continue":') : start + 500].decode())
    return str(text)


def _rss_mb(field: str = "VmRSS") -> float:
    """Of this process; what the allocator merely keeps is given back first."""
    if field == "VmRSS":
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


async def main() -> None:
    here = (sys.executable, "-m", "benchmarks.kubernetes")
    pipe = asyncio.subprocess.PIPE
    double = await asyncio.create_subprocess_exec(*here, "serve", stdin=pipe, stdout=pipe)
    try:
        assert double.stdout is not None
        url = (await double.stdout.readline()).decode().strip()
        client = await asyncio.create_subprocess_exec(*here, "measure", url, stdout=pipe)
        out, _ = await client.communicate()
    finally:
        assert double.stdin is not None
        double.stdin.close()
        await double.wait()
    found = json.loads(out)
    own_s = found["sync_s"] - found["raw_s"]
    size_kb = len(json.dumps(pod(1))) / 1000
    print(f"{PODS} pods of {size_kb:.1f} kB, best of {ROUNDS}")
    print(f"  added after import      {found['added_mb']:8.1f} MB   (peak {found['peak_mb']:.1f} MB)")
    print(f"  in sync                 {found['sync_s']:8.3f} s")
    print(f"  the double's own time   {found['raw_s']:8.3f} s")
    print(f"  ours                    {own_s:8.3f} s")
    print(
        json.dumps({"pods_5000_added_mb": round(found["added_mb"], 1), "pods_5000_sync_s": round(own_s, 3)})
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            asyncio.run(serve())
        case ["measure", url]:
            print(json.dumps(asyncio.run(measure(url))))
        case _:
            asyncio.run(main())
