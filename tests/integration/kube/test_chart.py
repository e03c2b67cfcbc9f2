"""The life of the chart with the real helm, where it takes the API server double to see it.

From install to uninstall, as any cluster shows it: tests/integration/cluster/test_release.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from epp.siblings.tls import MutualTls
from tests.kube import chart, kinds
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer

# ServiceMonitor and PrometheusRule are of an operator that the double does not have
EVERYTHING = chart.merged(
    chart.case("everything"),
    {"router": {"monitoring": {"prometheus": {"enabled": False}, "prometheusRule": {"enabled": False}}}},
)
SECRETS = ("", "v1", "secrets")
DEPLOYMENTS = ("apps", "v1", "deployments")
FLAGS = ("--disable-openapi-validation",)  # the double serves no OpenAPI v2


class Release:
    """One release in the double."""

    def __init__(self, kube: KubeServer, helm: Kubectl) -> None:
        self.kube, self.helm = kube, helm

    async def install(self, values: dict[str, Any]) -> str:
        return await self.helm.run(
            "install", "kv", str(chart.CHART), "-f", "-", *FLAGS, stdin=json.dumps(values)
        )

    async def upgrade(self, values: dict[str, Any], *flags: str) -> str:
        command = ("upgrade", "kv", str(chart.CHART), "-f", "-", *FLAGS, *flags)
        return await self.helm.run(*command, stdin=json.dumps(values))

    def get(self, key: tuple[str, str, str], name: str) -> dict[str, Any]:
        return self.kube.store.get(key, "default", name)

    def secret(self, name: str) -> dict[str, bytes]:
        data = self.get(SECRETS, name)["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    def template(self, name: str = "kv-epp") -> Any:
        return self.get(DEPLOYMENTS, name)["spec"]["template"]

    def left(self) -> list[tuple[str, str]]:
        """Everything in the namespace that controllers do not put there, as kind and name."""
        return [
            (table.kind.kind, name)
            for table in self.kube.store.tables.values()
            for (namespace, name) in table.objects
            if namespace == "default" and kinds.OF_EVERY_NAMESPACE.get(table.kind.key) != name
        ]


@pytest.fixture
def release(kube: KubeServer, helm: Kubectl) -> Release:
    return Release(kube, helm)


def values(**more: Any) -> dict[str, Any]:
    return chart.merged(chart.MINIMAL, more)


async def test_everything_installs_and_goes(release: Release) -> None:
    await release.install(EVERYTHING)
    left = set(release.left())
    assert {
        ("Job", "kv-calibrate-1"),
        ("HorizontalPodAutoscaler", "kv-epp"),
        ("NetworkPolicy", "kv-engine"),
    } <= left
    await release.upgrade(EVERYTHING)
    jobs = {name for kind, name in release.left() if kind == "Job"}
    assert jobs == {"kv-calibrate-2"}  # a Job cannot be changed: the next revision has its own
    await release.helm.run("uninstall", "kv")
    assert release.left() == []


async def test_a_key_that_is_missing_is_added_and_the_others_stay(release: Release) -> None:
    await release.install(values())
    old = release.get(SECRETS, "kv-keys")
    less = {name: text for name, text in old["data"].items() if name != "salt-key"}
    release.kube.store.update(SECRETS, "default", "kv-keys", old | {"data": less})
    await release.upgrade(values())
    new = release.get(SECRETS, "kv-keys")["data"]
    assert {name: new[name] for name in less} == less
    assert len(base64.b64decode(new["salt-key"])) == 43


async def test_a_secret_of_ones_own_is_not_touched(release: Release) -> None:
    await release.install(values(keys={"existingSecret": "mine"}))
    assert ("Secret", "kv-keys") not in release.left()
    assert "'secretName': 'mine'" in str(release.template())


async def test_siblings_trust_the_certificate_that_is_made(release: Release, tmp_path: Path) -> None:
    """TLS 1.3 both ways, under the name that the pickers' flags say, and the authority's key is gone."""
    await release.install(values(router={"epp": {"replicas": 2}}))
    secret = release.secret("kv-epp-sibling-tls")
    assert secret.keys() == {"ca.crt", "tls.crt", "tls.key"}
    for name, content in secret.items():
        (tmp_path / name).write_bytes(content)
    tls = MutualTls(tmp_path)
    arguments = release.template()["spec"]["containers"][0]["args"]
    name = next(a.partition("=")[2] for a in arguments if a.startswith("--sibling-server-name="))
    assert await handshake(tls.server_context(), tls.client_context(), name) == name
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(tls.server_context(), tls.client_context(), "another-epp")


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """The client's name as the server's certificate for it, over loopback."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    port = listening.sockets[0].getsockname()[1]
    async with listening, asyncio.timeout(30):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
        found = writer.get_extra_info("peercert")["subjectAltName"][0][1]
        writer.close()
    return str(found)


async def test_notes_say_what_to_do_next(release: Release) -> None:
    said = await release.install(values())
    commands = [line.strip() for line in said.partition("Next:")[2].splitlines() if line.strip()]
    assert [command.split()[0] for command in commands] == ["kubectl", "helm", "kubectl"]
    assert commands[1] == "helm test kv --namespace default --logs"
    assert "Pulls are off until the ConfigMap kv-epp-thresholds has a PullThresholds document" in said
    configured = await release.upgrade(values(thresholds={"spec": {"default": {"minCachedTokenDelta": 1}}}))
    assert "Pulls are off" not in configured
    attached = await release.upgrade(chart.case("attach"))
    assert "The pool's endpointPickerRef must name the Service kv-epp, port 9002" in attached


async def test_notes_warn_of_a_tier_that_crashed_before(release: Release) -> None:
    engine = {"enabled": True, "modelName": "m", "sizing": {"cpuTierGiB": 96}}
    said = await release.install(values(engine=engine))
    assert "WARNING: more than 64 GiB of CPU tier a rank" in said
    engine["sizing"] = {"cpuTierGiB": 96, "tensorParallelSize": 2}
    assert "CPU tier a rank" not in await release.upgrade(values(engine=engine))


async def test_notes_warn_while_everybody_reaches_the_events(release: Release) -> None:
    """S-H04: off by default, since it has to know the gateway; then it is said at every install."""
    warning = "WARNING: networkPolicy.enabled is false."
    assert warning in await release.install(values())
    peers = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
    said = await release.upgrade(values(networkPolicy={"enabled": True, "gateway": peers}))
    assert warning not in said


async def test_helm_test_runs_the_doctor(release: Release, kube: KubeServer) -> None:
    """The test plays the kubelet: the pod is what helm waits for."""
    await release.install(values())
    testing = asyncio.create_task(release.helm.run("test", "kv"))
    pods = kube.store.table(kinds.PODS.key).objects
    await kube.notice.until(lambda: ("default", "kv-doctor") in pods)
    pod = pods["default", "kv-doctor"]
    assert pod["spec"]["containers"][0]["args"][:2] == [
        "doctor",
        "--url=http://kv-epp.default.svc.cluster.local:9090",
    ]
    done = pod | {"status": {"phase": "Succeeded"}}
    kube.store.update(kinds.PODS.key, "default", "kv-doctor", done, status_only=True)
    said = await testing
    assert "Phase:          Succeeded" in said


async def test_nothing_is_left_of_an_install_that_is_refused(release: Release) -> None:
    refused = await release.helm.run("install", "kv", str(chart.CHART), *FLAGS, code=1)
    assert "router.modelServers.matchLabels: give the labels of the engines' pods" in refused
    assert release.left() == []
