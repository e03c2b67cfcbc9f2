"""Pickers are replaced one by one under load, behind a real Envoy that checks their health: nothing is lost.

Streams that are open when a picker is told to stop end as they began, byte for byte; new requests go to
another picker before the old one refuses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.local import envoy as local_envoy
from deploy.local.ports import ControlPorts
from tests.integration.app.test_picker_process import Picker, picker_process, until, write_thresholds
from tests.integration.engine.rig import BOUND_S
from tests.integration.extproc import envoy as test_envoy
from tests.integration.extproc.upstream import ANSWER, EVENTS, Upstream
from tests.ports import free_ports

CLIENTS = 12
OPEN_STREAMS = 8
REPLICAS = 3
# as in production: Envoy asks every 100 ms here, when it gets to run, and believes the first bad answer
LAME_DUCK = "5s"


@dataclass
class Rollout:
    """What the clients of a rollout saw."""

    url: str
    seen: Counter[str] = field(default_factory=Counter)
    stop: bool = False

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": "m", "prompt": [number] * 40}
        while not self.stop:
            self.seen[await self._one(session, body)] += 1

    async def _one(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                return "ok" if await answer.read() == ANSWER else f"status {answer.status}"
        except aiohttp.ClientError as error:
            return type(error).__name__

    async def more(self, requests: int) -> None:
        """Until so many more have been answered."""
        goal = self.seen.total() + requests

        async def answered() -> bool:
            return self.seen.total() >= goal

        await until(answered)


@contextlib.asynccontextmanager
async def gateway(folder: Path, picker_ports: list[int], *, tls: bool = True) -> AsyncIterator[str]:
    """The local fleet's Envoy with several pickers, to which it speaks TLS or plain HTTP/2; its URL."""
    gateway_port, lab_port, admin_port = free_ports(3)
    ports = ControlPorts(gateway_port, lab_port, admin_port, picker_ports[0], 0, 0)
    config = local_envoy.bootstrap(ports)
    for cluster in config["static_resources"]["clusters"]:
        if "health_checks" in cluster:
            cluster["health_checks"][0] |= {
                "interval": "0.1s",
                "no_traffic_interval": "0.1s",
                "no_traffic_healthy_interval": "0.1s",
                "unhealthy_threshold": 1,
            }
            if not tls:
                del cluster["transport_socket"]
            endpoints = [{"endpoint": {"address": test_envoy.address(port)}} for port in picker_ports]
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    command = local_envoy.EnvoyCommand(local_envoy.find_binary(), path)
    process = await asyncio.create_subprocess_exec(*command.argv())
    try:
        yield f"http://127.0.0.1:{gateway_port}"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), BOUND_S)


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    engine = Upstream("engine")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def rows(engine: Upstream) -> list[dict[str, Any]]:
    host, port = engine.address.split(":")
    return [{"pod": "engine", "host": host, "serving_port": int(port), "replay_port": 0}]


def folders(root: Path) -> Iterator[Path]:
    for number in range(2 * REPLICAS):
        folder = root / f"picker-{number}"
        (folder / "thresholds").mkdir(parents=True)
        write_thresholds(folder / "thresholds" / "pull.yaml", "{enabled: false}")
        yield folder


async def open_streams(session: aiohttp.ClientSession, url: str) -> list[aiohttp.ClientResponse]:
    """Answers that have begun and are held by the engine."""
    asks = [session.post(f"{url}/stream", json={"stream": n}) for n in range(OPEN_STREAMS)]
    return list(await asyncio.gather(*asks))


async def stop(picker: Picker) -> None:
    picker.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(2 * BOUND_S):
        assert await picker.process.wait() == 0


@pytest.mark.timeout(300)
async def test_every_replica_is_replaced_and_no_request_is_lost(tmp_path: Path) -> None:
    ports, places = free_ports(REPLICAS), folders(tmp_path)
    async with contextlib.AsyncExitStack() as running:
        engine = await running.enter_async_context(upstream())

        async def start(port: int) -> Picker:
            started = picker_process(next(places), rows(engine), grpc_port=port, lame_duck=LAME_DUCK)
            return await running.enter_async_context(started)

        pickers = [await start(port) for port in ports]
        url = await running.enter_async_context(gateway(tmp_path, ports))
        session = await running.enter_async_context(aiohttp.ClientSession())
        rollout = Rollout(url)

        async def serves() -> bool:
            return await rollout._one(session, {"model": "m", "prompt": [1]}) == "ok"

        await until(serves)
        clients = [asyncio.create_task(rollout.client(session, number)) for number in range(CLIENTS)]
        for old, port in zip(pickers, ports, strict=True):
            engine.hold = asyncio.Event()
            streams = await open_streams(session, url)
            stopping = asyncio.create_task(stop(old))
            await rollout.more(100)
            engine.hold.set()
            for stream in streams:
                assert await stream.read() == b"".join(EVENTS), "an answer that had begun"
            await stopping
            await start(port)
            await rollout.more(100)
        rollout.stop = True
        await asyncio.gather(*clients)
        assert rollout.seen.keys() == {"ok"}, rollout.seen
        assert rollout.seen["ok"] >= 200 * REPLICAS


@pytest.mark.timeout(120)
async def test_a_picker_that_is_killed_loses_what_it_had_and_no_more(tmp_path: Path) -> None:
    """The negative control: without a drain requests *are* lost, so the test above can see a loss."""
    ports, places = free_ports(2), folders(tmp_path)
    async with contextlib.AsyncExitStack() as running:
        engine = await running.enter_async_context(upstream())
        engine.hold = asyncio.Event()
        killed, _ = [
            await running.enter_async_context(picker_process(next(places), rows(engine), grpc_port=port))
            for port in ports
        ]
        url = await running.enter_async_context(gateway(tmp_path, ports))
        session = await running.enter_async_context(aiohttp.ClientSession())
        rollout = Rollout(url)

        async def serves() -> bool:
            return await rollout._one(session, {"model": "m", "prompt": [1]}) == "ok"

        await until(serves)
        streams = await open_streams(session, url)
        killed.process.kill()
        await killed.process.wait()
        engine.hold.set()
        ends = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
        whole = sum(end == b"".join(EVENTS) for end in ends)
        assert 0 < whole < OPEN_STREAMS, "those of the other picker, and only those"
        await until(serves)
