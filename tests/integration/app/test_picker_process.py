"""The picker's process with two emulated engines: a pull from decision to ledger, thresholds while it runs.

The test plays gateway (real gRPC) and sidecar (it puts the routing headers into the body).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import grpc
import pytest

from sidecar import wire as sidecar_wire
from tests.integration.engine.rig import (
    BLOCK,
    BLOCK_BYTES,
    BOUND_S,
    TOKENIZER,
    EngineClient,
    StartEngine,
    prompt_ids,
)
from tests.integration.extproc import client as gateway

ROOT = Path(__file__).parents[3]
TOKEN = "s3cret"
BLOCKS = 100
ANY_PORTS = ("--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", "--lame-duck", "0s")
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: precise-prefix-cache-producer}
- {type: active-request-scorer}
- {type: max-score-picker}
- {type: p2p-source-producer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
"""


def write_thresholds(path: Path, default: str) -> None:
    path.write_text(f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec: {{default: {default}}}\n")


def row(pod: str, engine: EngineClient) -> dict[str, Any]:
    running = engine.running
    return {
        "pod": pod,
        "host": engine.host,
        "serving_port": running.port,
        "metrics_port": running.port,
        "events_port": running.events_port,
        "replay_port": running.replay_port,
        "p2p_port": running.p2p_port,
    }


@dataclass
class Routed:
    """A decision whose stream is open."""

    stream: Any
    headers: dict[str, str]

    @property
    def destination(self) -> str:
        return self.headers["x-gateway-destination-endpoint"]

    @property
    def source(self) -> str | None:
        return self.headers.get(sidecar_wire.KV_CACHE_SOURCE_HOST_PORT)

    async def end(self) -> None:
        await self.stream.write(gateway.response_headers())
        await self.stream.write(gateway.response_body(b"{}", end=True))
        await self.stream.done_writing()
        while await self.stream.read() is not grpc.aio.EOF:
            pass


@dataclass
class Picker:
    process: asyncio.subprocess.Process
    ports: dict[str, int]
    channel: grpc.aio.Channel
    session: aiohttp.ClientSession
    token: str = TOKEN

    async def ask(self, prompt: list[int], request_id: str) -> Routed:
        stream = gateway.open_stream(self.channel)
        await stream.write(
            gateway.headers(("x-request-id", request_id), ("content-type", "application/json"))
        )
        await stream.write(gateway.body(json.dumps({"model": "m", "prompt": prompt}).encode(), end=True))
        answer = await stream.read()
        assert answer.WhichOneof("response") == "request_headers", answer
        mutation = answer.request_headers.response.header_mutation
        return Routed(stream, {h.header.key: h.header.raw_value.decode() for h in mutation.set_headers})

    async def debug(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.ports['metrics_port']}/debug/kvpull/{path}"
        async with self.session.get(url, headers={"Authorization": f"Bearer {self.token}"}) as response:
            return await response.json() if response.status == 200 else None

    async def metric(self, line: str) -> float:
        """Value of the sample that is written as `line`; 0 where it is absent."""
        url = f"http://127.0.0.1:{self.ports['metrics_port']}/metrics"
        async with self.session.get(url) as response:
            text = await response.text()
        return sum(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(line + " "))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Bounded wait for another process, which has no event to wait on."""
    async with asyncio.timeout(BOUND_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def picker_process(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    inputs: Sequence[str] = (),
    kubeconfig: Path | None = None,
    grpc_port: int = 0,
    lame_duck: str = "0s",
    config: str = CONFIG,
) -> AsyncIterator[Picker]:
    """`inputs`: flags that say where endpoints and thresholds come from, instead of files."""
    if not inputs:
        inputs = ("--endpoints-file", str(folder / "endpoints.json"))
        inputs += ("--thresholds-dir", str(folder / "thresholds"))
    (folder / "config.yaml").write_text(config)
    (folder / "token").write_text(TOKEN)
    (folder / "endpoints.json").write_text(json.dumps({"endpoints": rows}))
    arguments = (
        *("--config-file", str(folder / "config.yaml"), *inputs, "--debug-token-file", str(folder / "token")),
        *("--tokenizer", str(TOKENIZER), "--ledger-file", str(folder / "ledger.jsonl")),
        *ANY_PORTS,
        *("--grpc-port", str(grpc_port), "--lame-duck", lame_duck),
    )
    async with running_picker(arguments, kubeconfig) as picker:
        yield picker


@contextlib.asynccontextmanager
async def running_picker(
    arguments: Sequence[str],
    kubeconfig: Path | None = None,
    *,
    token: str = TOKEN,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Picker]:
    """The process under these arguments, once it is ready; it has ended at the end."""
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp", "--listen-host", "127.0.0.1", "--ready-fd", str(write_fd)),
        *arguments,
        cwd=ROOT,
        pass_fds=(write_fd,),
        env={**os.environ, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}), **environment},
    )
    os.close(write_fd)
    try:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
        )
        async with asyncio.timeout(BOUND_S):
            ports = json.loads(await reader.readline())
        async with (
            aiohttp.ClientSession() as session,
            await gateway.channel_to(
                ports["grpc_port"], secure="--secure-serving=false" not in arguments
            ) as channel,
        ):
            yield Picker(process, ports, channel, session, token)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_usable(picker: Picker, engines: dict[str, EngineClient]) -> None:
    """The picker claims both caches, knows both engines, and hears the reports of both."""

    async def claims() -> bool:
        return all(r["state"] == "live" and r["verified"] for r in await picker.debug("endpoints"))

    async def heard(engine: EngineClient) -> bool:
        unmatched = 'kvpull_epp_pull_reports_total{result="unmatched"}'
        before = await picker.metric(unmatched)
        await engine.complete(prompt_ids(2 * BLOCK, salt=7), transfer=engine.source("nobody's"))
        return await picker.metric(unmatched) > before

    await until(claims)
    for engine in engines.values():
        await until(functools.partial(heard, engine))


async def pull(picker: Picker, engines: dict[str, EngineClient]) -> list[Routed]:
    """Two requests for one prompt: the second goes elsewhere and pulls."""
    address = {f"{e.host}:{e.running.port}": pod for pod, e in engines.items()}
    prompt = prompt_ids(BLOCKS * BLOCK + 5)
    first = await picker.ask(prompt, "first")
    assert first.source is None
    owner = address[first.destination]
    await engines[owner].complete(prompt)

    async def known() -> bool:
        return any(r["blocks_cpu"] >= BLOCKS for r in await picker.debug("endpoints"))

    await until(known)
    second = await picker.ask(prompt, "second")
    assert second.source == first.destination != second.destination
    outstanding = f'kvpull_epp_pulls_outstanding{{endpoint="{owner}/0"}}'
    assert await picker.metric(outstanding) == 1
    decision_id = second.headers[sidecar_wire.DECISION_ID]
    transfer = engines[owner].source(decision_id)
    pulled = await engines[address[second.destination]].complete(prompt, transfer=transfer)
    assert pulled.report["pulled_bytes"] == BLOCKS * BLOCK_BYTES

    async def reported() -> bool:
        return bool((await picker.debug("decisions/second"))["pull"]["state"] == "reported")

    await until(reported)
    said = (await picker.debug(f"decisions/{decision_id}"))["pull"]
    assert (said["promised_tokens"], said["received_tokens"]) == (BLOCKS * BLOCK, BLOCKS * BLOCK)
    assert (said["received_bytes"], said["reason"], said["fallback"]) == (BLOCKS * BLOCK_BYTES, "ok", False)
    assert await picker.metric(outstanding) == 0
    return [first, second]


async def change_thresholds(picker: Picker, document: Path) -> Routed:
    """Off, then nonsense: the first is in force, the second is shown, without a restart."""

    async def changed() -> bool:
        return bool((await picker.debug("thresholds"))["generation"] == 2)

    async def refused() -> bool:
        return bool((await picker.debug("thresholds"))["rejected"])

    write_thresholds(document, "{enabled: false}")
    await until(changed)
    third = await picker.ask(prompt_ids(BLOCK), "third")
    said = await picker.debug("decisions/third")
    assert (said["reason"], said["threshold_generation"]) == ("switched_off", 2)
    write_thresholds(document, "{enabled: perhaps}")
    await until(refused)
    assert await picker.metric("kvpull_epp_threshold_rejected") == 1
    assert await picker.metric("kvpull_epp_threshold_generation") == 2
    return third


@pytest.mark.timeout(240)
async def test_a_pull_from_decision_to_ledger(start_engine: StartEngine, tmp_path: Path) -> None:
    engines = {"a": await start_engine(name="a"), "b": await start_engine(name="b")}
    (tmp_path / "thresholds").mkdir()
    document = tmp_path / "thresholds" / "pull.yaml"
    write_thresholds(document, "{minCachedTokenDelta: 64}")
    async with picker_process(tmp_path, [row(pod, engine) for pod, engine in engines.items()]) as picker:
        await until_usable(picker, engines)
        routed = await pull(picker, engines)
        routed.append(await change_thresholds(picker, document))
        for one in routed:
            await one.end()

        async def counted() -> bool:
            return await picker.metric("kvpull_epp_pull_kept_tokens_total") == BLOCKS * BLOCK

        await until(counted)
        assert await picker.metric("kvpull_epp_pull_delivered_bytes_total") == BLOCKS * BLOCK_BYTES
        picker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            assert await picker.process.wait() == 0
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    by_request = {r["request_id"]: r for r in rows}
    assert by_request.keys() == {"first", "second", "third"}
    assert by_request["second"]["pull"]["received_bytes"] == BLOCKS * BLOCK_BYTES
    assert by_request["first"]["reason"] == "no_holder"
