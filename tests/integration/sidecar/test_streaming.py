"""Streams: every piece at once, every byte the same, and a broken stream never looks complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.sidecar.doubles import WAIT_S, RawEngine, Received, raw_engine
from tests.integration.sidecar.rig import (
    COMPLETIONS,
    PORT,
    own_host,
    proxied,
    raw_exchange,
    raw_post,
    running,
    until,
)

_EVENTS = [b'data: {"n":%d,"t":"\xc3\xa9\xf0\x9f\x98\x80"}\n\n' % n for n in range(12)] + [
    b"data: [DONE]\n\n"
]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


async def _stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    return answer


async def test_event_n_arrives_before_the_engine_may_send_the_next(tmp_path: Path) -> None:
    allowed = asyncio.Semaphore(0)

    async def one_by_one(request: web.Request, _: Received) -> web.StreamResponse:
        answer = await _stream(request)
        for event in _EVENTS:
            await allowed.acquire()
            await answer.write(event)
        return answer

    async with (
        proxied(tmp_path, one_by_one) as (_, rig),
        rig.session.post(rig.url(COMPLETIONS), data=b"{}") as answer,
    ):
        assert answer.headers["Content-Type"] == "text/event-stream"  # before any event was allowed
        for event in _EVENTS:
            allowed.release()
            async with asyncio.timeout(WAIT_S):
                assert await answer.content.readexactly(len(event)) == event
        assert await answer.content.read() == b""


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_events_cut_at_every_byte(tmp_path: Path, framing: str) -> None:
    whole = b"".join(_EVENTS)

    async def byte_by_byte(
        engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        extra = {
            "chunked": b"Transfer-Encoding: chunked\r\n",
            "length": b"Content-Length: %d\r\n" % len(whole),
        }
        out.write(_HEAD + extra.get(framing, b"Connection: close\r\n") + b"\r\n")
        for n in range(len(whole)):
            piece = whole[n : n + 1]
            out.write(b"1\r\n" + piece + b"\r\n" if framing == "chunked" else piece)
            await out.drain()
            await asyncio.sleep(0)
        out.write(b"0\r\n\r\n" if framing == "chunked" else b"")
        await out.drain()

    async with raw_engine(own_host(), byte_by_byte) as engine, running(tmp_path, engine) as rig:
        assert (await rig.post(COMPLETIONS, b"{}")).body == whole


async def test_any_bytes_in_any_pieces_are_the_same_bytes(tmp_path: Path) -> None:
    """One sidecar for all examples: hypothesis runs inside its event loop's thread."""
    pieces: list[bytes] = []

    async def answer(request: web.Request, _: Received) -> web.StreamResponse:
        stream = await _stream(request)
        for piece in pieces:
            await stream.write(piece)
        return stream

    async with proxied(tmp_path, answer) as (_, rig):
        loop = asyncio.get_running_loop()

        @settings(max_examples=60, deadline=None)
        @given(st.lists(st.binary(min_size=1, max_size=5000), max_size=12))
        def same(drawn: list[bytes]) -> None:
            pieces[:] = drawn
            found = asyncio.run_coroutine_threadsafe(rig.post(COMPLETIONS, b"{}"), loop).result(WAIT_S)
            assert found.body == b"".join(drawn)

        await asyncio.to_thread(same)


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_stream_that_breaks_is_seen_as_broken(tmp_path: Path, framing: str) -> None:
    async def breaks(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        extra = b"Transfer-Encoding: chunked\r\n" if framing == "chunked" else b"Content-Length: 999\r\n"
        body = b"5\r\ndata:\r\n" if framing == "chunked" else b"data:"
        out.write(_HEAD + extra + b"\r\n" + body)
        await out.drain()

    async with raw_engine(own_host(), breaks) as engine, running(tmp_path, engine) as rig:
        async with rig.session.post(rig.url(COMPLETIONS), data=b"{}") as answer:
            assert answer.status == 200
            assert await answer.content.readexactly(5) == b"data:"
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        wire_bytes = await raw_exchange(rig.host, raw_post(COMPLETIONS, b"{}"))
        assert wire_bytes.count(b"HTTP/1.1") == 1, "no second answer after the first"
        assert not wire_bytes.endswith(b"0\r\n\r\n")
        assert rig.value("requests_total", plan="Aggregated", outcome="broken") == 2


async def test_a_broken_stream_to_an_old_client_is_a_reset(tmp_path: Path) -> None:
    """HTTP/1.0: the end of the connection is the end of the body, so it must not end in order."""

    async def breaks(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
        await out.drain()

    async with raw_engine(own_host(), breaks) as engine, running(tmp_path, engine) as rig:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(rig.host, b"GET /x HTTP/1.0\r\nHost: t\r\n\r\n")


async def test_a_stalled_stream_is_ended_after_the_idle_time(tmp_path: Path) -> None:
    async def stalls(request: web.Request, _: Received) -> web.StreamResponse:
        answer = await _stream(request)
        await answer.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return answer

    async with proxied(tmp_path, stalls, "--idle-timeout", "100ms") as (engine, rig):
        async with rig.session.post(rig.url(COMPLETIONS), data=b"{}") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        await engine.wait_cancelled()


async def test_a_client_that_stops_reading_does_not_hold_the_engine(tmp_path: Path) -> None:
    async def flood(request: web.Request, _: Received) -> web.StreamResponse:
        answer = await _stream(request)
        while True:
            await answer.write(b"x" * 65_536)

    async with proxied(tmp_path, flood, "--idle-timeout", "200ms") as (engine, rig):
        _, writer = await asyncio.open_connection(rig.host, PORT, limit=1024)
        writer.write(raw_post(COMPLETIONS, b"{}"))
        await engine.wait_cancelled()
        writer.transport.abort()
        await until(lambda: rig.value("active_requests") == 0)


async def test_a_request_body_is_streamed_too(tmp_path: Path) -> None:
    """Part n + 1 is sent only after the engine has seen part n."""
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(_: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for _n in range(3):
            size = int(await reader.readuntil(b"\r\n"), 16)
            seen.put_nowait((await reader.readexactly(size + 2))[:-2])
        out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"0\r\n\r\n")

    async with raw_engine(own_host(), script) as engine, running(tmp_path, engine) as rig:

        async def parts() -> AsyncIterator[bytes]:
            for part in (b"one", b"two", b"three"):
                yield part
                async with asyncio.timeout(WAIT_S):
                    assert await seen.get() == part

        headers = {"Content-Type": "application/octet-stream"}
        async with rig.session.put(rig.url("/upload"), data=parts(), headers=headers) as answer:
            assert await answer.read() == b"ok"


async def test_a_client_that_leaves_cancels_the_engines_request(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def endless(request: web.Request, _: Received) -> web.StreamResponse:
        answer = await _stream(request)
        await answer.write(b"data: 1\n\n")
        started.set()
        await asyncio.Event().wait()
        return answer

    async with proxied(tmp_path, endless) as (engine, rig):
        async with rig.session.post(rig.url(COMPLETIONS), data=b"{}") as answer:
            await answer.content.readexactly(9)
            answer.close()
        await engine.wait_cancelled()


async def test_a_client_that_leaves_before_the_first_byte(tmp_path: Path) -> None:
    async def silent(_: web.Request, __: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with proxied(tmp_path, silent) as (engine, rig):
        request = asyncio.create_task(rig.post(COMPLETIONS, b"{}"))
        await engine.wait_arrived()
        request.cancel()
        await engine.wait_cancelled()
