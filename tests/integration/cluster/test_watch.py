"""The reflector as a pod has it: an account's files, a watch that is ended, revisions that are forgotten."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.backoff import BackoffRule
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import CONFIG_MAPS, Selection
from tests.integration.kube.rig import Told, running
from tests.kube.cluster import Cluster
from tests.kube.notice import BOUND_S

ACCOUNT: dict[str, Any] = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "watcher"}}
SHORT = WatchRules(
    page_objects=2, shortest_watch_s=4, longest_watch_s=5, backoff=BackoffRule(first_s=0.1, most_s=0.5)
)
LONGER_THAN_A_TOKEN_IS_REMEMBERED = 4  # watches of 4 s; an API server believes what it saw for 10 s


def config_map(name: str, app: str = "llama", value: str = "") -> dict[str, Any]:
    meta = {"name": name, "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"key": value}}


class Pod:
    """What a pod of the account finds, and a reflector of ConfigMaps that lives in it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.told = Told()

    async def grant(self) -> None:
        rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}
        group = "rbac.authorization.k8s.io"
        named = {"apiVersion": f"{group}/v1", "metadata": {"name": "watcher"}}
        who = {"kind": "ServiceAccount", "name": "watcher", "namespace": self.cluster.namespace}
        role = {"apiGroup": group, "kind": "Role", "name": "watcher"}
        await self.cluster.apply(
            ACCOUNT,
            named | {"kind": "Role", "rules": [rule]},
            named | {"kind": "RoleBinding", "roleRef": role, "subjects": [who]},
        )

    async def mount(self) -> dict[str, str]:
        """The account's files; the variables of its container."""
        config = json.loads(await self.cluster.kubectl.run("config", "view", "--raw", "-o", "json"))
        server = config["clusters"][0]["cluster"]
        (self.folder / "ca.crt").write_bytes(base64.b64decode(server["certificate-authority-data"]))
        (self.folder / "namespace").write_text(self.cluster.namespace)
        await self.new_token()
        url = urlsplit(server["server"])
        return {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port)}

    async def new_token(self) -> None:
        (self.folder / "token").write_text(
            (await self.cluster.kubectl.run("create", "token", "watcher")).strip()
        )

    def reflector(self, access: KubeAccess) -> Reflector[str]:
        return Reflector(
            access,
            Selection(CONFIG_MAPS, self.cluster.namespace, labels="app=llama"),
            lambda raw: str(json.loads(bytes(raw))["data"]["key"]),
            self.told,
            rules=SHORT,
            rng=random.Random(0),
        )

    async def until(self, *entries: tuple[str, str]) -> None:
        await self.told.until(lambda: set(entries) <= set(self.told.log))


async def _until_watched(reflector: Reflector[str], more: int) -> None:
    goal = reflector.status.watches + more
    async with asyncio.timeout(2 * BOUND_S):
        while reflector.status.watches < goal:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.05)


async def _until_revision(reflector: Reflector[str], old: str | None) -> None:
    async with asyncio.timeout(2 * BOUND_S):
        while reflector._revision == old:  # noqa: ASYNC110 - nothing else shows a bookmark
            await asyncio.sleep(0.05)


@pytest.mark.timeout(300)
async def test_a_watch_goes_on_whatever_the_server_ends_or_forgets(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "account"
    folder.mkdir()
    pod = Pod(cluster, folder)
    await pod.grant()
    access = KubeAccess(Environment(await pod.mount(), folder))
    await access.open()
    try:
        reflector = pod.reflector(access)
        await cluster.apply(*(config_map(name) for name in "abcde"), config_map("other", "else"))
        async with running(reflector.run()):
            await _follow(cluster, pod)
            await _until_watched(reflector, 1)  # the server ended one
            assert (reflector.status.lists, reflector.status.expired) == (1, 0), "resumed where it was"
            seen, told = reflector._revision, len(pod.told.log)
            await cluster.apply(config_map("other", "else", "changed"))
            await _until_revision(reflector, seen)
            assert len(pod.told.log) == told, "a bookmark told of a change that is none of ours"
        reflector._revision = "1"
        async with running(reflector.run()):
            await _until_watched(reflector, 2)
            # 410 and a list, or everything over again from a server so young that it has forgotten nothing
            status = reflector.status
            assert (status.lists, status.expired) in ((2, 1), (1, 0))
            assert (("replace", "c,d,e,f") in pod.told.log) == (status.expired == 1)
            assert sorted(pod.told.objects) == ["c", "d", "e", "f"]
            await _lose_the_token(cluster, pod, reflector)
    finally:
        await access.close()


async def _follow(cluster: Cluster, pod: Pod) -> None:
    """Pages, then one event for each change; an object that leaves the selection is gone."""
    await pod.until(("replace", "a,b,c,d,e"))
    await cluster.apply(config_map("f"), config_map("a", "else"))
    await cluster.kubectl.run("delete", "configmap", "b")
    await pod.until(("put", "f"), ("remove", "a"), ("remove", "b"))
    assert len(pod.told.log) == 4


async def _lose_the_token(cluster: Cluster, pod: Pod, reflector: Reflector[str]) -> None:
    """The account is made anew: its old tokens are worth nothing, the file has another one."""
    await cluster.kubectl.run("delete", "serviceaccount", "watcher")
    await cluster.apply(ACCOUNT)
    await pod.new_token()
    await _until_watched(reflector, LONGER_THAN_A_TOKEN_IS_REMEMBERED)
    await cluster.apply(config_map("g", value="new"))
    await pod.until(("put", "g"))
    assert pod.told.objects["g"] == "new"
