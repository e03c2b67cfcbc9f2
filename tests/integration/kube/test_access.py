"""Credentials: in-cluster files and KUBECONFIG, and what happens when they change under way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.errors import AccessError, Denied, Unauthorised, Unreachable
from sidecar.pool_watch.reflector import WatchRules
from sidecar.pool_watch.resources import PODS, Call
from tests.integration.kube.rig import Rig, add_pod, open_access, reflecting, running
from tests.kube.rbac import ADMIN
from tests.kube.server import KubeServer, kube_server
from tests.kube.tls import write_certificate

LIST = Call("list", PODS, "default")


@dataclass
class Pod:
    """The files and variables that a pod finds, and the server they lead to."""

    kube: KubeServer
    folder: Path

    @property
    def environment(self) -> Environment:
        url = urlsplit(self.kube.url)
        variables = {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port)}
        return Environment(variables, self.folder)

    def rotate(self, token: str) -> None:
        """A new token in the file; the old one is refused from now on."""
        (self.folder / "token").write_text(token)
        self.kube.authority.tokens = {token: ADMIN}


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    _, tls = write_certificate(tmp_path)
    (tmp_path / "namespace").write_text("llm\n")
    async with kube_server(tls=tls) as kube:
        pod = Pod(kube, tmp_path)
        pod.rotate("t1")
        yield pod


async def test_in_cluster_files_are_used(pod: Pod) -> None:
    access = KubeAccess(pod.environment)
    await access.open()
    add_pod(pod.kube, "a")
    answer = json.loads(await access.read(LIST))
    assert [item["metadata"]["name"] for item in answer["items"]] == ["a"]
    assert access.namespace == "llm"
    assert pod.kube.requests[-1].user == ADMIN
    await access.close()


async def test_a_rotated_token_costs_one_refused_request(pod: Pod) -> None:
    access = KubeAccess(pod.environment)
    await access.open()
    rig = Rig(access, WatchRules())
    async with running(rig.reflector.run()):
        watch = await pod.kube.until_watched("pods")
        pod.rotate("t2")
        watch.end()
        rig.clock.now_s += 5
        await pod.kube.notice.until(lambda: watch not in pod.kube.watches)
        await pod.kube.until_watched("pods", 2)
        add_pod(pod.kube, "a")
        await rig.told.until(lambda: "a" in rig.told.objects)
        assert rig.status.failures == 1
        assert rig.pauses == []  # at once, with the new token
        assert pod.kube.count("list", "pods") == 1
    await access.close()


async def test_a_token_that_stays_refused_backs_off(pod: Pod) -> None:
    access = KubeAccess(pod.environment)
    await access.open()
    pod.kube.authority.tokens = {"another": ADMIN}
    rig = Rig(access, WatchRules())
    async with running(rig.reflector.run()):
        await rig.paused.until(lambda: len(rig.pauses) == 3)
        assert rig.pauses[2] > rig.pauses[0]
        assert "401" in rig.status.error
        assert "t1" not in rig.status.error
    await access.close()


async def test_an_authority_that_changes_is_read_again(pod: Pod, tmp_path: Path) -> None:
    access = KubeAccess(pod.environment)
    await access.open()
    good = (tmp_path / "ca.crt").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    write_certificate(other)
    (tmp_path / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    late = KubeAccess(pod.environment)
    await late.open()
    with pytest.raises(Unreachable):
        await late.read(LIST)
    (tmp_path / "ca.crt").write_bytes(good)
    with pytest.raises(Unreachable):
        await late.read(LIST)  # still the old one; it is read again now
    assert json.loads(await late.read(LIST))["items"] == []
    await late.close()
    await access.close()


async def test_kubeconfig_and_its_namespace_of_default(kube: KubeServer, tmp_path: Path) -> None:
    kube.authority.tokens["secret-token"] = ADMIN
    async with open_access(kube, tmp_path, token="secret-token") as access:
        assert json.loads(await access.read(LIST))["kind"] == "PodList"
        assert access.namespace == "default"
    async with open_access(kube, tmp_path, token="wrong") as access:
        with pytest.raises(Unauthorised) as caught:
            await access.read(LIST)
    assert "wrong" not in str(caught.value)


async def test_somebody_without_a_role_is_told_by_name(kube: KubeServer, tmp_path: Path) -> None:
    kube.authority.tokens["t"] = "jane"
    async with open_access(kube, tmp_path, token="t") as access:
        with pytest.raises(Denied, match="user jane may not list pods in namespace default"):
            await access.read(LIST)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "this is not a pod with a ServiceAccount token, and KUBECONFIG is not set"),
        ({"KUBECONFIG": "/nowhere/config"}, "cannot be used"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"},
            "token file does not exist",
        ),
    ],
)
async def test_no_configuration_is_said(variables: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=told):
        await KubeAccess(Environment(variables, tmp_path)).open()


async def test_nobody_there(kube: KubeServer, tmp_path: Path) -> None:
    async with open_access(kube, tmp_path) as access:
        async with kube_server() as gone:
            path = gone.write_kubeconfig(tmp_path / "gone")
        lost = KubeAccess(Environment({"KUBECONFIG": str(path)}))
        await lost.open()
        with pytest.raises(Unreachable, match="list pods"):
            await lost.read(LIST)
        await lost.close()
        assert json.loads(await access.read(LIST))["items"] == []


async def test_nothing_of_a_token_is_in_what_the_reflector_says(kube: KubeServer, tmp_path: Path) -> None:
    kube.authority.tokens["good"] = ADMIN
    async with reflecting(kube, tmp_path, token="bad-but-secret") as rig:
        await rig.paused.until(lambda: bool(rig.pauses))
        assert "bad-but-secret" not in str(rig.status)
