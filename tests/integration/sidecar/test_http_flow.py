"""Bytes between the two sides: who waits for whom, what is used again, what a broken answer looks like."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest
from aiohttp import web

from sidecar.http.server import MAX_PIPELINED, ServerConnection
from tests.integration.sidecar.doubles import WAIT_S, RawEngine, Received, echo, raw_engine
from tests.integration.sidecar.raw_client import connected, post_and_stay
from tests.integration.sidecar.rig import (
    COMPLETIONS,
    Rig,
    own_host,
    proxied,
    raw_exchange,
    raw_post,
    running,
    until,
)


async def test_fast_answers_of_an_early_engine_reach_a_client_that_still_sends(tmp_path: Path) -> None:
    """The engine answers at the head and reads no body; both connections end, the answer arrives."""

    async def script(_: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        out.write(b"HTTP/1.1 401 No\r\nContent-Length: 4\r\n\r\nnope")
        await out.drain()
        await reader.read()

    async with (
        raw_engine(own_host(), script) as engine,
        running(tmp_path, engine) as rig,
        connected(rig) as client,
    ):
        head = b"PUT /up HTTP/1.1\r\nHost: t\r\nContent-Type: a/b\r\nContent-Length: 1000\r\n\r\n"
        await client.send(head + b"x" * 10)
        assert await client.answer() == (b"HTTP/1.1 401 No\r\nContent-Length: 4\r\n\r\n", b"nope")
        await client.send(b"x" * 990 + post_and_stay(b"never"))
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 401"), "the client's connection went on, on a new one to the engine"
        assert engine.connections == 2


async def test_an_upload_waits_for_an_engine_that_reads_slowly(tmp_path: Path) -> None:
    """Back-pressure: the client cannot send what the engine does not take."""
    go_on = asyncio.Event()

    async def script(_: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        await reader.readexactly(size)
        out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    size = 64 << 20
    async with (
        raw_engine(own_host(), script) as engine,
        running(tmp_path, engine) as rig,
        connected(rig) as client,
    ):
        head = b"PUT /up HTTP/1.1\r\nHost: t\r\nContent-Type: a/b\r\nContent-Length: %d\r\n\r\n" % size
        client.writer.write(head + bytes(size))
        (connection,) = _connections(rig)
        await until(lambda: connection._paused)
        await _turns()
        assert client.writer.transport.get_write_buffer_size() > size // 2, "it has not left the client"
        go_on.set()
        assert (await client.answer())[1] == b"ok"


async def test_an_engine_waits_for_a_client_that_reads_slowly(tmp_path: Path) -> None:
    """Back-pressure the other way: what the client does not take stays in the engine."""
    piece, count, written = b"x" * 65_536, 1000, 0

    async def flood(request: web.Request, _: Received) -> web.StreamResponse:
        nonlocal written
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _n in range(count):
            await answer.write(piece)
            written += 1
        return answer

    async with proxied(tmp_path, flood) as (_, rig), connected(rig) as client:
        await client.send(raw_post(COMPLETIONS, b"{}"))
        (connection,) = _connections(rig)
        await until(lambda: connection.congested)
        await _turns()
        assert written < count // 2
        answer = await client.rest()
        assert answer.count(b"x") == len(piece) * count
        assert answer.endswith(b"0\r\n\r\n")


async def test_a_client_that_pipelines_many_is_slowed_down_and_not_refused(tmp_path: Path) -> None:
    """Behind the second request nothing is read: more than may be taken at once are served, in order."""
    go_on, count = asyncio.Event(), MAX_PIPELINED + 50

    async def first_waits(request: web.Request, received: Received) -> web.StreamResponse:
        await go_on.wait()
        return await echo(request, received)

    async with proxied(tmp_path, first_waits) as (engine, rig), connected(rig) as client:
        for n in range(count):
            await client.send(post_and_stay(b"%d" % n + b" " * 5000))
            await _turns(2)
        await engine.wait_arrived()
        go_on.set()
        for n in range(count):
            assert (await client.answer())[1].rstrip() == b"%d" % n


async def _turns(count: int = 2000) -> None:
    """Of the one event loop of client, sidecar and engine: all that can move has moved."""
    for _ in range(count):
        await asyncio.sleep(0)


def _connections(rig: Rig) -> set[ServerConnection]:
    return rig.sidecar._listeners[0]._service.connections


@pytest.mark.parametrize("rest", [b"", b"x" * 10], ids=["half a body", "a whole one"])
async def test_a_client_that_left_costs_no_memory(tmp_path: Path, rest: bytes) -> None:
    """At once, not when the garbage collector comes round: it may have sent megabytes."""

    async def never(_: web.Request, __: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with proxied(tmp_path, never) as (engine, rig):
        gc.collect()
        gc.disable()
        try:
            async with connected(rig) as client:
                await client.send(post_and_stay(b"y" * 10 + rest)[: None if rest else -5])
                await until(lambda: rig.value("active_requests") == 1)
                if rest:
                    await engine.wait_arrived()
                (connection,) = _connections(rig)
                left = weakref.ref(connection)
                del connection
            await until(lambda: rig.value("active_requests") == 0)
            await until(lambda: left() is None)
        finally:
            gc.enable()


async def test_a_second_answer_of_an_engine_is_nobodys(tmp_path: Path) -> None:
    """Response splitting: what an engine sends beyond an answer is not taken for the next one."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        once = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
        out.write(once + b"first" + once + b"stray")
        await out.drain()
        await reader.read()

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        for _ in range(3):
            assert (await rig.post(COMPLETIONS, b"{}")).body == b"first"
        assert engine.connections == 3
        assert rig.value("retries_total", kind="stale_connection") == 0, "none was used again"


async def test_what_an_engine_says_unasked_ends_its_connection(tmp_path: Path) -> None:
    say_more, closed = asyncio.Event(), asyncio.Event()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(answer + b"asked")
        await out.drain()
        await say_more.wait()
        out.write(answer + b"stray")
        assert await engine.read_request(reader) == b""
        closed.set()

    flags = ("--upstream-keepalive", "60s")
    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine, *flags) as rig:
        assert (await rig.post(COMPLETIONS, b"{}")).body == b"asked"
        say_more.set()
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
        assert (await rig.post(COMPLETIONS, b"{}")).body == b"asked"
        assert engine.connections == 2


@pytest.mark.parametrize("most", [1, 2])
async def test_idle_connections_to_an_engine_are_limited(tmp_path: Path, most: int) -> None:
    together = asyncio.Barrier(3)

    async def at_once(_: web.Request, __: Received) -> web.StreamResponse:
        async with asyncio.timeout(WAIT_S):
            await together.wait()
        return web.Response(body=b"{}")

    flags = ("--max-idle-conns-per-host", str(most), "--upstream-keepalive", "60s")
    async with proxied(tmp_path, at_once, *flags) as (engine, rig):
        for _ in range(2):
            await asyncio.gather(*(rig.post(COMPLETIONS, b"{}") for _ in range(3)))
        assert len(engine.connections) == 3 + (3 - most)


async def test_idle_connections_end_by_age(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await out.drain()
        assert await reader.read() == b""
        closed.set()

    async with (
        raw_engine(own_host(), script) as engine,
        running(tmp_path, engine, "--upstream-keepalive", "50ms") as rig,
    ):
        assert (await rig.post(COMPLETIONS, b"{}")).body == b"ok"
        async with asyncio.timeout(WAIT_S):
            await closed.wait()


@pytest.mark.parametrize(
    ("framing", "wire", "body"),
    [
        (
            "chunked",
            b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=1\r\nde\r\n0\r\nT: v\r\n\r\n",
            b"abcde",
        ),
        ("length", b"Content-Length: 5\r\n\r\nabcde", b"abcde"),
        ("close", b"Connection: close\r\n\r\nabcde", b"abcde"),
    ],
)
async def test_an_answer_cut_at_every_byte_is_whole_or_broken(
    tmp_path: Path, framing: str, wire: bytes, body: bytes
) -> None:
    """The engine ends its connection after n bytes: only with the last one is the answer complete."""
    whole = b"HTTP/1.1 200 OK\r\n" + wire
    at = 0

    async def script(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(whole[:at])
        await out.drain()

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:
        for at in range(len(whole) + 1):
            answer = await raw_exchange(rig.host, raw_post(COMPLETIONS, b"{}"))
            in_head = at < whole.index(b"\r\n\r\n") + 4
            complete = at == len(whole) or (framing == "close" and not in_head)
            assert answer.startswith(b"HTTP/1.1 502" if in_head else b"HTTP/1.1 200"), at
            if framing == "length" and not in_head:
                assert answer.partition(b"\r\n\r\n")[2] == body[: at - len(whole) + 5], at
            elif not in_head:
                assert answer.endswith(b"0\r\n\r\n") == complete, at
            if complete:
                assert _body(answer) == (body if framing != "close" else whole[:at].partition(b"\r\n\r\n")[2])
        await until(lambda: rig.value("active_requests") == 0)


def _body(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return rest
    found = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found, rest = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return found
