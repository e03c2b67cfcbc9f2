"""An engine that is away, dies, talks nonsense, or drops idle connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.integration.sidecar.doubles import WAIT_S, RawEngine, Received, echo, raw_engine, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, own_host, proxied, raw_exchange, running

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_an_engine_that_is_not_there_is_503(tmp_path: Path) -> None:
    async with recording_engine(own_host()) as engine:
        pass
    async with running(tmp_path, engine) as rig:
        answer = await rig.post(COMPLETIONS, b"{}")
        assert (answer.status, answer.json["object"], answer.json["code"]) == (503, "error", 503)
        assert rig.value("legs_total", leg="engine", outcome="unreachable") == 1
        assert rig.value("requests_total", plan="Aggregated", outcome="unreachable") == 1


@pytest.mark.parametrize(
    ("bytes_sent", "code"),
    [(b"", 502), (b"HTTP/1.1 200 OK\r\nContent-", 502), (b"SSH-2.0-x\r\n\r\n", 502)],
    ids=["silence", "half a head", "not HTTP"],
)
async def test_an_engine_that_ends_without_an_answer(tmp_path: Path, bytes_sent: bytes, code: int) -> None:
    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(bytes_sent)

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        answer = await rig.post(COMPLETIONS, b"{}")
        assert (answer.status, answer.json["object"]) == (code, "error")
        assert engine.connections == 1, "a fresh connection that died is not tried again"


async def test_an_engine_that_never_answers_is_504(tmp_path: Path) -> None:
    async def never(_: web.Request, __: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with proxied(tmp_path, never, "--idle-timeout", "100ms") as (engine, rig):
        assert (await rig.post(COMPLETIONS, b"{}")).status == 504
        await engine.wait_cancelled()


@pytest.mark.parametrize("with_body", [True, False], ids=["POST", "GET"])
async def test_a_reused_connection_that_died_is_replaced_once(tmp_path: Path, with_body: bool) -> None:
    """The engine closes on its second request, as if its keep-alive time had just run out."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        while await engine.read_request(reader):
            if len(engine.heads) == 2:
                return
            out.write(_OK)
            await out.drain()

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        for _ in range(2):
            if with_body:
                assert (await rig.post(COMPLETIONS, b"{}")).body == b"ok"
            else:
                async with rig.session.get(rig.url("/v1/models")) as answer:
                    assert await answer.read() == b"ok"
        assert (engine.connections, len(engine.heads)) == (2, 3)


async def test_a_request_is_sent_twice_at_most(tmp_path: Path) -> None:
    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        if len(engine.heads) == 1:
            out.write(_OK)
            await out.drain()
            await engine.read_request(reader)

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        assert (await rig.post(COMPLETIONS, b"{}")).status == 200
        assert (await rig.post(COMPLETIONS, b"{}")).status == 502
        assert len(engine.heads) == 3
        assert rig.value("retries_total", kind="stale_connection") == 1


@pytest.mark.parametrize("sent_bytes", [1, 20, len(_OK) - 1], ids=["a byte", "half a head", "half a body"])
async def test_half_an_answer_is_never_asked_for_again(tmp_path: Path, sent_bytes: int) -> None:
    """Over a connection that was reused: had it not answered at all, the request would be sent once more."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        while await engine.read_request(reader):
            out.write(_OK if len(engine.heads) == 1 else _OK[:sent_bytes])
            await out.drain()
            if len(engine.heads) == 2:
                return

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        assert (await rig.post(COMPLETIONS, b"{}")).status == 200
        if sent_bytes == len(_OK) - 1:
            with pytest.raises(aiohttp.ClientPayloadError):
                await rig.post(COMPLETIONS, b"{}")
        else:
            assert (await rig.post(COMPLETIONS, b"{}")).status == 502
        assert len(engine.heads) == 2


async def test_idle_connections_are_reused(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig):
        for _ in range(20):
            assert (await rig.post(COMPLETIONS, b"{}")).status == 200
    assert len(engine.connections) == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /\xff HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
        _POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        _POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
    ids=["target", "smuggling", "two lengths", "nonsense", "huge header"],
)
async def test_a_request_that_is_not_http_never_reaches_the_engine(
    tmp_path: Path, request_bytes: bytes
) -> None:
    async with proxied(tmp_path) as (engine, rig):
        assert (await raw_exchange(rig.host, request_bytes)).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert engine.received == []


async def test_a_body_with_broken_framing_is_400_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with proxied(tmp_path) as (engine, rig):
        answer = await raw_exchange(rig.host, head + b"my secret\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert engine.received == []
    assert "refused a request that is not HTTP: Invalid character in chunk size" in caplog.text
    assert "secret" not in caplog.text


async def test_a_client_that_never_sends_its_body_is_408(tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\n{"
    async with proxied(tmp_path, echo, "--body-timeout", "50ms") as (engine, rig), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(rig.host, PORT)
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        assert engine.received == []


async def test_a_client_that_sends_half_a_body_and_leaves(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig):
        _, writer = await asyncio.open_connection(rig.host, PORT)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert (await rig.post(COMPLETIONS, b"{}")).status == 200
        assert len(engine.received) == 1
