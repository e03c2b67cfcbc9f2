"""Two pickers as processes on one API server: who serves, and that what the page grants is enough."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.integration.app.test_cluster_process import apply, set_up
from tests.integration.app.test_picker_process import Picker, picker_process, until
from tests.integration.engine.rig import BOUND_S
from tests.integration.kube.test_page import HA_RBAC
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer

FLAGS = ("--pool-name", "llama", "--pool-namespace", "default")


@contextlib.asynccontextmanager
async def replica(
    folder: Path,
    name: str,
    kubeconfig: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[str, ...] = FLAGS,
) -> AsyncIterator[Picker]:
    (folder / name).mkdir()
    monkeypatch.setenv("POD_NAME", name)
    flags = (*where, "--ha-mode", mode)
    async with picker_process(folder / name, [], inputs=flags, kubeconfig=kubeconfig) as picker:
        yield picker


async def health(picker: Picker, service: str) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ports['health_port']}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=BOUND_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def ready(picker: Picker) -> bool:
    return await health(picker, "readiness")


async def end(picker: Picker) -> None:
    picker.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(BOUND_S):
        assert await picker.process.wait() == 0


def used(kube: KubeServer) -> set[str]:
    """Verbs on Leases that the picker's ServiceAccount asked for."""
    return {s.verb for s in kube.requests if s.user.endswith(":kvpull-epp") and s.plural == "leases"}


@pytest.fixture
async def kubeconfig(kube: KubeServer, kubectl: Kubectl, tmp_path: Path) -> Path:
    path = await set_up(kube, kubectl, tmp_path)
    await apply(kubectl, HA_RBAC)
    return path


@pytest.mark.timeout(180)
async def test_active_passive(
    kubeconfig: Path, kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        replica(tmp_path, "one", kubeconfig, "active-passive", monkeypatch) as one,
        replica(tmp_path, "two", kubeconfig, "active-passive", monkeypatch) as two,
    ):
        await until(lambda: ready(one))
        assert not await ready(two)
        assert await health(two, "liveness"), "a kubelet must not restart the one that waits"
        assert await two.metric("kvpull_epp_leader") == 0
        await end(one)
        await until(lambda: ready(two))
        assert await two.metric("kvpull_epp_leader") == 1
        assert kube.store.get(kinds.LEASES.key, "default", "kvpull-epp")["spec"]["holderIdentity"] == "two"
        await end(two)
    assert used(kube) == {"get", "create", "update"}


@pytest.mark.timeout(180)
async def test_active_active(
    kubeconfig: Path, kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        replica(tmp_path, "one", kubeconfig, "active-active", monkeypatch) as one,
        replica(tmp_path, "two", kubeconfig, "active-active", monkeypatch) as two,
    ):
        for picker in (one, two):
            await until(lambda picker=picker: both_known(picker))  # type: ignore[misc]
            assert await ready(picker)
        await kube.notice.until(lambda: "update" in used(kube))  # a Lease is renewed
        await end(one)
        await until(lambda: alone(two))
        await end(two)
    assert not kube.store.table(kinds.LEASES.key).objects, "who leaves takes its Lease along"
    assert used(kube) == {"get", "create", "update", "delete", "list", "watch"}


async def both_known(picker: Picker) -> bool:
    return await picker.metric("kvpull_epp_replicas") == 2


async def alone(picker: Picker) -> bool:
    return await picker.metric("kvpull_epp_replicas") == 1
