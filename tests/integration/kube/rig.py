"""A reflector against the double, with its pauses written down instead of waited for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.backoff import BackoffRule
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import PODS, Selection
from tests.kube import kinds
from tests.kube.notice import Notice
from tests.kube.server import KubeServer

NAMESPACE = "default"
FAST = WatchRules(backoff=BackoffRule(0.001, 0.002))  # where the pause itself is not the matter


def pod(name: str, ip: str = "", *, ready: bool = True, app: str = "llama", **more: Any) -> dict[str, Any]:
    """A pod as a kubelet reports it; `more` goes into its metadata."""
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    meta = {"name": name, "labels": {"app": app} | more.pop("labels", {})} | more
    spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}
    return {"metadata": meta, "spec": spec, "status": status | ({"podIP": ip} if ip else {})}


def add_pod(kube: KubeServer, name: str, ip: str = "", **more: Any) -> None:
    kube.store.create(kinds.PODS.key, NAMESPACE, pod(name, ip, **more))


def set_status(kube: KubeServer, name: str, ip: str = "", *, ready: bool = True) -> None:
    body = kube.store.get(kinds.PODS.key, NAMESPACE, name) | {"status": pod(name, ip, ready=ready)["status"]}
    kube.store.update(kinds.PODS.key, NAMESPACE, name, body, status_only=True)


def delete_pod(kube: KubeServer, name: str) -> None:
    """Gone at once."""
    kube.store.delete(kinds.PODS.key, NAMESPACE, name, now=True)


class Told:
    """A sink that remembers what it was told, and in which order."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []
        self.notice = Notice()

    def replace(self, objects: dict[str, Any]) -> None:
        self.objects = dict(objects)
        self._note("replace", ",".join(sorted(objects)) if len(objects) < 10 else str(len(objects)))

    def put(self, name: str, value: Any) -> None:
        self.objects[name] = value
        self._note("put", name)

    def remove(self, name: str) -> None:
        self.objects.pop(name, None)
        self._note("remove", name)

    def _note(self, what: str, name: str) -> None:
        self.log.append((what, name))
        self.notice.tell()

    async def until(self, predicate: Callable[[], bool]) -> None:
        await self.notice.until(predicate)


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """One running reflector of the pods labelled app=llama."""

    def __init__(self, access: KubeAccess, rules: WatchRules) -> None:
        self.told = Told()
        self.clock = Clock()
        self.pauses: list[float] = []
        self.paused = Notice()
        self.reflector = Reflector(
            access,
            Selection(PODS, NAMESPACE, labels="app=llama"),
            lambda raw: json.loads(bytes(raw))["metadata"]["resourceVersion"],
            self.told,
            rules=rules,
            rng=random.Random(0),
            clock=self.clock,
            pause=self._pause,
        )

    @property
    def status(self) -> Any:
        return self.reflector.status

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.paused.tell()
        await asyncio.sleep(0)


@asynccontextmanager
async def open_access(kube: KubeServer, folder: Path, *, token: str = "") -> AsyncIterator[KubeAccess]:
    path = kube.write_kubeconfig(folder / "reflector-kubeconfig", token=token)
    access = KubeAccess(Environment({"KUBECONFIG": str(path)}))
    await access.open()
    try:
        yield access
    finally:
        await access.close()


@asynccontextmanager
async def reflecting(
    kube: KubeServer, folder: Path, *, token: str = "", rules: WatchRules | None = None
) -> AsyncIterator[Rig]:
    async with open_access(kube, folder, token=token) as access:
        rig = Rig(access, rules or WatchRules())
        async with running(rig.reflector.run()):
            yield rig


@asynccontextmanager
async def running(component: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A component for as long as the block; its faults fail the test."""
    task = asyncio.create_task(component)
    try:
        yield task
    finally:
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
