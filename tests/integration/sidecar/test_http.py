"""HTTP/1.1 on the client's side: order, keep-alive, limits, and what is not a request."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from sidecar.http.server import MAX_PIPELINED, ServerConnection
from tests.integration.sidecar.doubles import (
    WAIT_S,
    RawEngine,
    Received,
    echo,
    raw_engine,
    status,
)
from tests.integration.sidecar.rig import (
    COMPLETIONS,
    PORT,
    Rig,
    own_host,
    proxied,
    raw_exchange,
    raw_post,
    running,
    until,
)


@dataclass
class Client:
    """A raw connection that reads one answer at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[bytes, bytes]:
        """The next answer's head and body, by its content-length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            return head, await self.reader.readexactly(int(length or 0))

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(rig: Rig) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(rig.host, PORT)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def _post(body: bytes, *lines: str) -> bytes:
    """A request after which the connection stays open."""
    return raw_post(COMPLETIONS, body, *lines).replace(b"Connection: close\r\n", b"")


async def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    """The second is sent to the engine only when the first has been answered."""
    go_on = asyncio.Event()

    async def first_waits(request: web.Request, received: Received) -> web.StreamResponse:
        if received.body == b"0":
            await go_on.wait()
        return await echo(request, received)

    async with proxied(tmp_path, first_waits) as (engine, rig), connected(rig) as client:
        await client.send(b"".join(_post(b"%d" % n) for n in range(10)))
        await engine.wait_arrived()
        go_on.set()
        assert [(await client.answer())[1] for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert [received.body for received in engine.received] == [b"%d" % n for n in range(10)]
        await client.send(_post(b"again"))
        assert (await client.answer())[1] == b"again"


async def test_pipelined_requests_in_any_cut(tmp_path: Path) -> None:
    whole = _post(b"one") + b"GET /two HTTP/1.1\r\nHost: t\r\n\r\n" + _post(b"three")
    async with proxied(tmp_path) as (engine, rig):
        for at in range(1, len(whole), 7):
            async with connected(rig) as client:
                await client.send(whole[:at])
                await asyncio.sleep(0)
                await client.send(whole[at:])
                assert [(await client.answer())[1] for _ in range(3)] == [b"one", b"", b"three"]
        assert len(engine.received) == 3 * len(range(1, len(whole), 7))


async def test_too_many_requests_at_once_end_the_connection_after_what_was_taken(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def waits(request: web.Request, received: Received) -> web.StreamResponse:
        await go_on.wait()
        return await echo(request, received)

    async with proxied(tmp_path, waits) as (engine, rig), connected(rig) as client:
        await client.send(b"".join(_post(b"x") for _ in range(MAX_PIPELINED + 10)))
        await engine.wait_arrived()
        go_on.set()
        answers = await client.rest()
        served = len(engine.received)
        assert answers.count(b"HTTP/1.1 200") == served <= MAX_PIPELINED + 1
        assert answers.count(b"HTTP/1.1 400") == 1


async def test_nonsense_behind_a_request_is_refused_after_its_answer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig), connected(rig) as client:
        await client.send(_post(b"fine") + b"NONSENSE\r\n\r\n")
        answers = await client.rest()
        assert answers.startswith(b"HTTP/1.1 200")
        assert answers.index(b"fine") < answers.index(b"HTTP/1.1 400")
        assert len(engine.received) == 1


async def test_a_request_that_ends_the_connection_is_the_last(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig), connected(rig) as client:
        await client.send(raw_post(COMPLETIONS, b"last") + _post(b"never"))
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1") == 1
        assert b"Connection: close" in answers
        assert answers.endswith(b"last")
        assert [received.body for received in engine.received] == [b"last"]


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_old_client_gets_the_end_of_the_connection(tmp_path: Path, framing: str) -> None:
    async def answer(request: web.Request, _: Received) -> web.StreamResponse:
        if framing == "length":
            return web.Response(body=b"body")
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"body")
        return stream

    async with proxied(tmp_path, answer) as (engine, rig):
        answered = await raw_exchange(rig.host, b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answered.endswith(b"\r\n\r\nbody")
        assert b"Transfer-Encoding" not in answered
        assert engine.last.values("host") == [engine.address], "HTTP/1.0 has no Host, HTTP/1.1 must"


async def test_a_client_that_asks_first_is_told_to_continue(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig), connected(rig) as client:
        request = _post(b"{}", "Expect: 100-continue")
        await client.send(request[:-2])
        assert (await client.answer())[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"{}")
        assert (await client.answer())[1] == b"{}"
        assert engine.last.values("expect") == []
        await client.send(_post(b"[]"))
        assert (await client.answer())[1] == b"[]"


async def test_a_client_that_asks_first_may_be_refused_without_sending(tmp_path: Path) -> None:
    """Nobody knows whether its body will come, so the connection ends."""
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (engine, rig), connected(rig) as client:
        await client.send(_post(b"x" * 11, "Expect: 100-continue")[:-11])
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 413")
        assert b"Connection: close" in head
        assert await client.rest() == b""
        assert engine.received == []


async def test_the_connection_goes_on_behind_a_body_that_was_refused(tmp_path: Path) -> None:
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (engine, rig), connected(rig) as client:
        request = _post(b"x" * 1000)
        await client.send(request[:-500])
        assert (await client.answer())[0].startswith(b"HTTP/1.1 413")
        await client.send(request[-500:] + _post(b"next"))
        assert (await client.answer())[1] == b"next"
        assert [received.body for received in engine.received] == [b"next"]


async def test_a_refused_upload_that_never_ends_does_not_hold_the_connection(tmp_path: Path) -> None:
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (_, rig), connected(rig) as client:
        await client.send(_post(b"x" * 1000)[:-500])
        assert (await client.answer())[0].startswith(b"HTTP/1.1 413")
        assert await client.rest() == b"", "closed after the linger time"


async def test_a_refused_client_that_still_sends_can_read_why(tmp_path: Path) -> None:
    """Closing a socket with unread bytes would reset it, and the answer with it."""
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (engine, rig):
        answer = await raw_exchange(rig.host, raw_post(COMPLETIONS, b"x" * (8 << 20)))
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.endswith(b"}")
        garbage = await raw_exchange(rig.host, b"NONSENSE\r\n\r\n" + b"x" * (8 << 20))
        assert garbage.startswith(b"HTTP/1.1 400")
        assert engine.received == []


async def test_an_upgrade_is_not_taken_up(tmp_path: Path) -> None:
    """RFC 9110 7.8: a server may ignore it; what follows is not read."""
    async with proxied(tmp_path, status(200, b"plain")) as (engine, rig):
        head = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        answer = await raw_exchange(rig.host, head + b"HTTP2-Settings: AAMA\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"plain")
        assert engine.last.values("upgrade") == engine.last.values("http2-settings") == []
        tunnel = await raw_exchange(rig.host, b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n")
        assert tunnel.startswith(b"HTTP/1.1 400")
        assert len(engine.received) == 1


async def test_the_second_head_has_a_limit_too(tmp_path: Path) -> None:
    async with (
        proxied(tmp_path, echo, "--head-timeout", "100ms") as (engine, rig),
        connected(rig) as client,
    ):
        await client.send(_post(b"one") + b"POST /v1/completions HT")
        assert (await client.answer())[1] == b"one"
        assert await client.rest() == b""
        assert len(engine.received) == 1


async def test_an_idle_connection_is_not_under_the_heads_limit(tmp_path: Path) -> None:
    """Silence after an answer is keep-alive: a connection opened later is closed earlier."""
    async with (
        proxied(tmp_path, echo, "--head-timeout", "100ms") as (_, rig),
        connected(rig) as idle,
    ):
        await idle.send(_post(b"one"))
        assert (await idle.answer())[1] == b"one"
        async with connected(rig) as silent:
            assert await silent.rest() == b""
        await idle.send(_post(b"two"))
        assert (await idle.answer())[1] == b"two"


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
        await client.send(b"x" * 990 + _post(b"never"))
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
            await client.send(_post(b"%d" % n + b" " * 5000))
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
                await client.send(_post(b"y" * 10 + rest)[: None if rest else -5])
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


async def test_head_gets_the_head_alone(tmp_path: Path) -> None:
    async with proxied(tmp_path, status(200, b"12345")) as (engine, rig), connected(rig) as client:
        for _ in range(3):
            await client.send(b"HEAD /x HTTP/1.1\r\nHost: t\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 5\r\n" in head
        await client.send(_post(b"{}"))
        assert (await client.answer())[1] == b"12345"
        assert len(engine.received) == 4


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
