"""Start, readiness, drain and stop; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sidecar import wire
from sidecar.config import parse_config
from sidecar.server import Sidecar
from tests.integration.sidecar.doubles import WAIT_S, Received, RecordingEngine, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, own_host, proxied, row, running, until

_METRICS_PORT = 8100
_START_S = 60.0  # an interpreter and its imports, on a machine that is busy


async def test_no_task_or_socket_is_left_after_200_mixed_requests(tmp_path: Path) -> None:
    rng = random.Random(7)

    async def moody(request: web.Request, received: Received) -> web.StreamResponse:
        mood = received.json["mood"] if received.body.startswith(b"{") else "fine"
        if mood == "fails":
            return web.Response(status=503, body=b"{}")
        if mood == "never" and "kv_transfer_params" in received.json:
            await asyncio.Event().wait()
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(3):
            await answer.write(b"data: x\n\n")
        if mood == "breaks":
            assert request.transport is not None
            request.transport.close()
        return answer

    before = _census()
    async with recording_engine(own_host(), moody) as peer, recording_engine(own_host(), moody) as engine:
        pool = [row(peer.host, peer.port)]
        async with running(tmp_path, engine, "--prefill-timeout", "50ms", pool=pool) as rig:

            async def one(n: int) -> None:
                body = {"prompt": "p", "mood": rng.choice(["fine", "fails", "breaks", "never"])}
                routing = rng.choice([None, wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT])
                headers = {routing: peer.address} if routing else {}
                call = asyncio.create_task(rig.post(COMPLETIONS, body, **headers))
                if n % 5 == 0 or body["mood"] == "never":
                    await asyncio.wait({call}, timeout=rng.random() / 50)
                    call.cancel()
                with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
                    await call

            for start in range(0, 200, 20):
                await asyncio.gather(*(one(n) for n in range(start, start + 20)))
            await until(lambda: rig.value("active_requests") == 0)
            await until(lambda: not _legs_running())
    await until(lambda: _census() == before)


def _legs_running() -> list[str]:
    return [text for text in map(repr, asyncio.all_tasks()) if "SplitLegs" in text]


def _census() -> tuple[int, int]:
    """Tasks of this loop, and open sockets of this process."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return len(asyncio.all_tasks()), sum(link.startswith("socket:") for link in links)


async def test_drain_finishes_streams_and_refuses_new_connections(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def waits(request: web.Request, _: Received) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"first ")
        await go_on.wait()
        await answer.write(b"last")
        return answer

    async with proxied(tmp_path, waits) as (_, rig):
        async with rig.session.post(rig.url(COMPLETIONS), data=b"{}") as answer:
            assert await answer.content.readexactly(6) == b"first "
            draining = asyncio.create_task(rig.sidecar.drain())
            await until(lambda: _refuses(rig.host))
            assert not draining.done()
            go_on.set()
            assert await answer.content.read() == b"last"
        async with asyncio.timeout(WAIT_S):
            await draining


async def test_a_draining_sidecar_sends_requests_elsewhere(tmp_path: Path) -> None:
    """What arrives on an open connection is refused in a way that a gateway retries."""
    async with proxied(tmp_path) as (engine, rig):
        rig.sidecar.refuse_new()
        answer = await rig.post(COMPLETIONS, b"{}")
        assert (answer.status, answer.json["code"]) == (503, 503)
        assert (answer.headers["Retry-After"], answer.headers["Connection"]) == ("1", "close")
        async with rig.session.get(rig.url("/health")) as health:
            assert health.status == 503
        assert engine.received == []
        assert rig.value("requests_total", plan="unplanned", outcome="draining") == 1


def _refuses(host: str) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, PORT)) != 0


async def test_after_the_drain_time_streams_are_broken_off(tmp_path: Path) -> None:
    async def endless(request: web.Request, _: Received) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"first ")
        await asyncio.Event().wait()
        return answer

    async with recording_engine(own_host(), endless) as engine:
        stack = contextlib.AsyncExitStack()
        rig = await stack.enter_async_context(running(tmp_path, engine, "--drain-timeout", "50ms"))
        async with (
            aiohttp.ClientSession() as session,
            session.post(rig.url(COMPLETIONS), data=b"{}") as answer,
        ):
            assert await answer.content.readexactly(6) == b"first "
            async with asyncio.timeout(WAIT_S):
                await stack.aclose()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        await engine.wait_cancelled()


async def test_a_failed_start_leaves_nothing_bound(tmp_path: Path) -> None:
    host = own_host()
    pool = tmp_path / "pool.json"
    await asyncio.to_thread(pool.write_text, '{"endpoints": []}')
    argv = ["--listen-host", host, "--endpoints-file", str(pool), "--data-parallel-size", "2"]
    argv += ["--secure-proxy=false"]
    blocker = await asyncio.start_server(lambda _, writer: writer.close(), host, PORT + 1)
    async with blocker:
        with pytest.raises(OSError, match="address already in use"):
            await Sidecar(parse_config(argv, {})).__aenter__()
    assert _refuses(host)
    async with Sidecar(parse_config(argv, {})) as sidecar:
        assert sidecar.addresses == [f"{host}:8000", f"{host}:8001"]


# --- the process ----------------------------------------------------------------------------------


@asynccontextmanager
async def process(
    tmp_path: Path, engine: RecordingEngine, host: str, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    pool = tmp_path / "pool.json"
    await asyncio.to_thread(pool.write_text, '{"endpoints": []}')
    ours, theirs = os.pipe()
    argv = [
        "--listen-host",
        host,
        "--model-server-host",
        engine.host,
        "--model-server-port",
        str(engine.port),
    ]
    argv += ["--endpoints-file", str(pool), "--ready-fd", str(theirs), "--metrics-port", str(_METRICS_PORT)]
    argv += ["--secure-proxy=false"]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "sidecar", *argv, *flags),
        pass_fds=(theirs,),
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(theirs)
    try:
        with os.fdopen(ours) as pipe:
            async with asyncio.timeout(_START_S):
                line = await asyncio.to_thread(pipe.readline)
        yield child, json.loads(line)
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_the_process_serves_reports_and_ends_on_sigterm(tmp_path: Path) -> None:
    host = own_host()
    async with (
        recording_engine(own_host()) as engine,
        process(tmp_path, engine, host, "--log-level", "debug") as (child, ready),
        aiohttp.ClientSession() as session,
    ):
        assert ready == {"ready": True, "addresses": [f"{host}:{PORT}"], "metrics_port": _METRICS_PORT}
        async with session.post(
            f"http://{host}:{PORT}{COMPLETIONS}",
            data=b'{"prompt":"a secret"}',
            headers={"Authorization": "Bearer secret-token"},
        ) as answer:
            assert await answer.read() == b'{"prompt":"a secret"}'
        async with session.get(f"http://{host}:{_METRICS_PORT}/metrics") as answer:
            page = await answer.text()
        assert 'kvpull_sidecar_requests_total{outcome="complete",plan="Aggregated"} 1.0' in page
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            _, log = await child.communicate()
        assert child.returncode == 0
        assert b"Aggregated complete, status 200" in log
        assert b"secret" not in log
        assert b"Traceback" not in log


async def test_sigterm_under_load_finishes_every_stream(tmp_path: Path) -> None:
    """30 open streams go to their end; whoever comes after the signal is refused; the process ends."""
    streams, go_on = 30, asyncio.Event()

    async def slow(request: web.Request, _: Received) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: first\n\n")
        await go_on.wait()
        for n in range(20):
            await answer.write(b"data: %d\n\n" % n)
        return answer

    expected = b"".join([b"data: first\n\n", *(b"data: %d\n\n" % n for n in range(20))])
    host, started = own_host(), asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        recording_engine(own_host(), slow) as engine,
        process(tmp_path, engine, host, "--drain-timeout", "60s") as (child, _),
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):

        async def one() -> bytes:
            async with session.post(f"http://{host}:{PORT}{COMPLETIONS}", data=b"{}") as answer:
                first = await answer.content.readexactly(13)
                started.release()
                return first + await answer.content.read()

        calls = [asyncio.create_task(one()) for _ in range(streams)]
        for _ in calls:
            async with asyncio.timeout(WAIT_S):
                await started.acquire()
        child.send_signal(signal.SIGTERM)
        await until(lambda: _refuses(host))
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.post(f"http://{host}:{PORT}{COMPLETIONS}", data=b"{}")
        assert child.returncode is None
        go_on.set()
        assert await asyncio.gather(*calls) == [expected] * streams
        async with asyncio.timeout(WAIT_S):
            _, log = await child.communicate()
        assert child.returncode == 0
        assert b"Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--kv-connector", "moriio"),
            b"'moriio' is not supported, use one of offloading, nixlv2, sglang, mooncake",
        ),
        (("--endpoints-file", "absent.yaml"), b"cannot start: absent.yaml: No such file"),
    ],
)
async def test_a_process_that_cannot_start_says_why(flags: tuple[str, ...], sentence: bytes) -> None:
    argv = ["--listen-host", own_host(), "--endpoints-file", "absent.yaml", *flags]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", *argv), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_START_S):
            _, log = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 2
    assert sentence in log
    assert b"Traceback" not in log
