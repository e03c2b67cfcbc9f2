"""A sidecar whose allow-list is an InferencePool: whom it follows, and from when to when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from sidecar import wire
from sidecar.allowlist import AllowList
from sidecar.config import parse_config
from sidecar.endpoint import HostPort
from sidecar.pool_members import PoolReference, watch_members
from sidecar.pool_watch.access import Environment
from sidecar.pool_watch.errors import AccessError
from sidecar.pool_watch.resources import POOL_GROUP
from sidecar.server import Sidecar
from sidecar.telemetry import Telemetry
from tests.integration.kube.rig import add_pod, delete_pod
from tests.integration.kube.test_pool_watch import pool
from tests.integration.sidecar.doubles import RecordingEngine, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, Rig, own_host, until
from tests.kube import kinds
from tests.kube.server import KubeServer

SOURCE = wire.KV_CACHE_SOURCE_HOST_PORT


@asynccontextmanager
async def sidecar_in_pool(
    kube: KubeServer, folder: Path, patch: pytest.MonkeyPatch, engine: RecordingEngine
) -> AsyncIterator[Rig]:
    patch.setenv("KUBECONFIG", str(kube.write_kubeconfig(folder / "config")))
    host = own_host()
    argv = ["--listen-host", host, "--port", str(PORT), "--model-server-host", engine.host]
    argv += ["--model-server-port", str(engine.port), "--kv-connector", "offloading"]
    argv += ["--inference-pool", "default/llama", "--p2p-connector-port", "7700", "--secure-proxy=false"]
    async with Sidecar(parse_config(argv, {})) as sidecar, aiohttp.ClientSession() as session:
        yield Rig(sidecar, host, session, folder / "unused")


def source_port(engine: RecordingEngine) -> int | None:
    """P2P port of the source that the engine was told."""
    params = engine.last.json.get("kv_transfer_params") or {}
    return (params.get("remote_kv_source") or {}).get("remote_port")


async def test_members_of_the_pool_are_followed_until_they_are_gone(
    kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000, 8001))
    add_pod(kube, "peer", "10.0.0.7")
    add_pod(kube, "stranger", "10.0.0.8", app="else")
    async with (
        recording_engine(own_host()) as engine,
        sidecar_in_pool(kube, tmp_path, monkeypatch, engine) as rig,
    ):
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: "10.0.0.7:8001"})
        assert source_port(engine) == 7701  # of rank 1
        for address in ("10.0.0.8:8000", "10.0.0.7:8002", "10.0.0.7:22"):
            await rig.post(COMPLETIONS, b"{}", **{SOURCE: address})
            assert source_port(engine) is None
        assert rig.value("routing_headers_dropped_total", header=SOURCE, reason="not_allowed") == 3
        kube.store.delete(kinds.PODS.key, "default", "peer")  # it drains
        add_pod(kube, "next", "10.0.0.9")
        await until(lambda: rig.value("members") == 4)
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: "10.0.0.7:8000"})
        assert source_port(engine) == 7700
        delete_pod(kube, "peer")
        await until(lambda: rig.value("members") == 2)
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: "10.0.0.7:8000"})
        assert source_port(engine) is None
        age = rig.sidecar.telemetry.registry.get_sample_value(
            "kvpull_kube_cache_age_seconds", {"resource": "pods"}
        )
        assert age is not None


LLAMA = PoolReference("llama", POOL_GROUP, 7777)


async def test_without_a_first_list_it_serves_and_follows_nobody(kube: KubeServer, tmp_path: Path) -> None:
    rule = kube.faults.hold(verb="list")
    allow_list, telemetry = AllowList(), Telemetry()
    kube.store.create(kinds.INFERENCE_POOLS, "default", pool(8000))
    add_pod(kube, "peer", "10.0.0.7")
    environment = Environment({"KUBECONFIG": str(kube.write_kubeconfig(tmp_path / "config"))})
    async with watch_members(LLAMA, allow_list, telemetry, environment=environment, first_list_s=0.0):
        assert allow_list.enforced
        assert allow_list.find(HostPort.parse("10.0.0.7:8000")) is None
        rule.stop()
        await until(lambda: allow_list.find(HostPort.parse("10.0.0.7:8000")) is not None)


async def test_no_api_server_to_be_reached_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="KUBECONFIG is not set"):
        async with watch_members(LLAMA, AllowList(), Telemetry(), environment=Environment({}, tmp_path)):
            pass
