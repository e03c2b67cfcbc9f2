"""SIGTERM of one of two pickers under load, behind a real Envoy that checks their health: nobody notices."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.app.plain_picker import picker
from tests.integration.extproc import envoy
from tests.integration.extproc.upstream import EVENTS, Upstream

CLIENTS = 12
LAME_DUCK = ("--lame-duck", "2s", "--drain-timeout", "60s")


def two_pickers(bootstrap: dict[str, Any], ports: list[int]) -> dict[str, Any]:
    """Health-checked as the chart configures it, only faster."""
    (cluster,) = (c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "picker")
    endpoints = [{"endpoint": {"address": envoy.address(port)}} for port in ports]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    cluster["health_checks"] = [
        {
            "timeout": "5s",
            "interval": "0.1s",
            "no_traffic_interval": "0.1s",
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
    ]
    return bootstrap


class Load:
    """Clients that ask one after the other, some for streams."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.good = 0
        self.bad: list[str] = []
        self.stop = asyncio.Event()
        self._answered = asyncio.Condition()

    async def run(self) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(CLIENTS):
                group.create_task(self._ask(session, "/stream" if number % 3 else "/v1/completions"))

    async def _ask(self, session: aiohttp.ClientSession, path: str) -> None:
        while not self.stop.is_set():
            try:
                async with session.post(self.url + path, json={"model": "m", "prompt": "p"}) as answer:
                    body = await answer.read()
            except aiohttp.ClientError as error:
                self.bad.append(type(error).__name__)
                continue
            if answer.status != 200 or (path == "/stream" and body != b"".join(EVENTS)):
                self.bad.append(f"{answer.status} {body[:200]!r}")
            self.good += 1
            async with self._answered:
                self._answered.notify_all()

    async def until_answered(self, count: int) -> None:
        """`count` more answers."""
        wanted = self.good + count
        async with asyncio.timeout(60), self._answered:
            await self._answered.wait_for(lambda: self.good >= wanted or bool(self.bad))


@pytest.mark.timeout(240)
async def test_sigterm_under_load_loses_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        upstream = Upstream("a")
        await upstream.start()
        stack.push_async_callback(upstream.stop)
        host, _, port = upstream.address.rpartition(":")
        row = {"pod": "a", "host": host, "serving_port": int(port)}
        (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
        first, first_ports = await stack.enter_async_context(picker(tmp_path, LAME_DUCK))
        _, second_ports = await stack.enter_async_context(picker(tmp_path, LAME_DUCK))
        plain = envoy.bootstrap
        ports = [given["grpc_port"] for given in (first_ports, second_ports)]
        monkeypatch.setattr(envoy, "bootstrap", lambda *given: two_pickers(plain(*given), ports))
        urls = await stack.enter_async_context(envoy.running(ports[0], tmp_path, [upstream.address]))
        load = Load(urls["duplex"])
        running = asyncio.create_task(load.run())
        await load.until_answered(20 * CLIENTS)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.wait(), 90) == 0
        await load.until_answered(5 * CLIENTS)
        load.stop.set()
        await running
    assert load.bad == []
