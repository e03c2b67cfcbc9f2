"""A node with an engine and a picker is drained under load: nobody notices.

What `kubectl drain` does to pods is a deletion of each; the test plays the kubelet: SIGTERM for the picker
at once, for the engine when its preStop is over, and the pod is gone when its process is. Pickers, Envoy,
kubectl and the streams are real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.app.test_cluster_process import FLAGS, POOL, set_up
from tests.integration.app.test_picker_process import Picker, picker_process, until
from tests.integration.app.test_rolling_update import LAME_DUCK, Rollout, gateway, open_streams, stop
from tests.integration.extproc.upstream import EVENTS, Upstream
from tests.integration.kube.rig import add_pod, delete_pod
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer
from tests.ports import free_ports

CLIENTS = 8
HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3"}


@contextlib.asynccontextmanager
async def engines(port: int) -> AsyncIterator[dict[str, Upstream]]:
    """At the pool's one target port, each at an address of its own."""
    found = {name: Upstream(name) for name in HOSTS}
    for name, engine in found.items():
        await engine.start(HOSTS[name], port)
    try:
        yield found
    finally:
        for engine in found.values():
            await engine.stop()


def work(engine: Upstream) -> int:
    """Requests that had a body: a scrape has none."""
    return sum(map(bool, engine.bodies))


async def know(pickers: list[Picker], **draining: bool) -> None:
    """Until every picker sees these endpoints and no others, draining or not."""

    async def seen() -> bool:
        pages = [await picker.debug("endpoints") for picker in pickers]
        return all({row["pod"]: row["draining"] for row in page} == draining for page in pages)

    await until(seen)


@pytest.mark.timeout(300)
async def test_a_node_is_drained_under_load_and_no_request_is_lost(
    kube: KubeServer, kubectl: Kubectl, tmp_path: Path
) -> None:
    target, *ports = free_ports(3)
    kubeconfig = await set_up(kube, kubectl, tmp_path)
    await kubectl.run("apply", "-f", "-", stdin=POOL.replace("8000", str(target)))
    async with contextlib.AsyncExitStack() as running:
        servers = await running.enter_async_context(engines(target))
        for name, host in HOSTS.items():
            add_pod(kube, name, host, labels={"node": "n1" if name == "a" else "n2"})
        pickers = []
        for port in ports:
            folder = tmp_path / str(port)
            folder.mkdir()
            started = picker_process(
                folder, [], inputs=FLAGS, kubeconfig=kubeconfig, grpc_port=port, lame_duck=LAME_DUCK
            )
            pickers.append(await running.enter_async_context(started))
        await know(pickers, a=False, b=False)
        url = await running.enter_async_context(gateway(tmp_path, ports))
        session = await running.enter_async_context(aiohttp.ClientSession())
        load = Rollout(url)

        async def serves() -> bool:
            return await load._one(session, {"model": "m", "prompt": [1]}) == "ok"

        await until(serves)
        clients = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        await load.more(50)
        for engine in servers.values():
            engine.hold = asyncio.Event()
        streams = await open_streams(session, url)
        assert all(work(engine) > 10 for engine in servers.values())  # both have work

        await kubectl.run("delete", "pod", "--selector", "node=n1", "--wait=false")
        stopping = asyncio.create_task(stop(pickers[0]))
        await know(pickers[1:], a=True, b=False)
        await load.more(CLIENTS)  # what was decided before has arrived
        before = work(servers["a"])
        await load.more(100)
        for engine in servers.values():
            assert engine.hold is not None
            engine.hold.set()
        for stream in streams:
            assert await stream.read() == b"".join(EVENTS), "an answer that had begun"
        await stopping
        assert work(servers["a"]) == before, "new work for an engine that is going"
        await servers["a"].stop()
        delete_pod(kube, "a")
        await know(pickers[1:], b=False)
        await load.more(50)
        load.stop = True
        await asyncio.gather(*clients)
    assert load.seen.keys() == {"ok"}, load.seen
