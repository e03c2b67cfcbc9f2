"""HTTP/1.1 on the client's side: order, keep-alive, limits, and what is not a request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from sidecar.http.server import MAX_PIPELINED
from tests.integration.sidecar.doubles import WAIT_S, Received, echo, status
from tests.integration.sidecar.raw_client import connected, post_and_stay
from tests.integration.sidecar.rig import (
    COMPLETIONS,
    proxied,
    raw_exchange,
    raw_post,
)


async def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    """The second is sent to the engine only when the first has been answered."""
    go_on = asyncio.Event()

    async def first_waits(request: web.Request, received: Received) -> web.StreamResponse:
        if received.body == b"0":
            await go_on.wait()
        return await echo(request, received)

    async with proxied(tmp_path, first_waits) as (engine, rig), connected(rig) as client:
        await client.send(b"".join(post_and_stay(b"%d" % n) for n in range(10)))
        await engine.wait_arrived()
        go_on.set()
        assert [(await client.answer())[1] for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert [received.body for received in engine.received] == [b"%d" % n for n in range(10)]
        await client.send(post_and_stay(b"again"))
        assert (await client.answer())[1] == b"again"


async def test_pipelined_requests_in_any_cut(tmp_path: Path) -> None:
    whole = post_and_stay(b"one") + b"GET /two HTTP/1.1\r\nHost: t\r\n\r\n" + post_and_stay(b"three")
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
        await client.send(b"".join(post_and_stay(b"x") for _ in range(MAX_PIPELINED + 10)))
        await engine.wait_arrived()
        go_on.set()
        answers = await client.rest()
        served = len(engine.received)
        assert answers.count(b"HTTP/1.1 200") == served <= MAX_PIPELINED + 1
        assert answers.count(b"HTTP/1.1 400") == 1


async def test_nonsense_behind_a_request_is_refused_after_its_answer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig), connected(rig) as client:
        await client.send(post_and_stay(b"fine") + b"NONSENSE\r\n\r\n")
        answers = await client.rest()
        assert answers.startswith(b"HTTP/1.1 200")
        assert answers.index(b"fine") < answers.index(b"HTTP/1.1 400")
        assert len(engine.received) == 1


async def test_a_request_that_ends_the_connection_is_the_last(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig), connected(rig) as client:
        await client.send(raw_post(COMPLETIONS, b"last") + post_and_stay(b"never"))
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
        request = post_and_stay(b"{}", "Expect: 100-continue")
        await client.send(request[:-2])
        assert (await client.answer())[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"{}")
        assert (await client.answer())[1] == b"{}"
        assert engine.last.values("expect") == []
        await client.send(post_and_stay(b"[]"))
        assert (await client.answer())[1] == b"[]"


async def test_a_client_that_asks_first_may_be_refused_without_sending(tmp_path: Path) -> None:
    """Nobody knows whether its body will come, so the connection ends."""
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (engine, rig), connected(rig) as client:
        await client.send(post_and_stay(b"x" * 11, "Expect: 100-continue")[:-11])
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 413")
        assert b"Connection: close" in head
        assert await client.rest() == b""
        assert engine.received == []


async def test_the_connection_goes_on_behind_a_body_that_was_refused(tmp_path: Path) -> None:
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (engine, rig), connected(rig) as client:
        request = post_and_stay(b"x" * 1000)
        await client.send(request[:-500])
        assert (await client.answer())[0].startswith(b"HTTP/1.1 413")
        await client.send(request[-500:] + post_and_stay(b"next"))
        assert (await client.answer())[1] == b"next"
        assert [received.body for received in engine.received] == [b"next"]


async def test_a_refused_upload_that_never_ends_does_not_hold_the_connection(tmp_path: Path) -> None:
    async with proxied(tmp_path, echo, "--max-body-bytes", "10") as (_, rig), connected(rig) as client:
        await client.send(post_and_stay(b"x" * 1000)[:-500])
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
        await client.send(post_and_stay(b"one") + b"POST /v1/completions HT")
        assert (await client.answer())[1] == b"one"
        assert await client.rest() == b""
        assert len(engine.received) == 1


async def test_an_idle_connection_is_not_under_the_heads_limit(tmp_path: Path) -> None:
    """Silence after an answer is keep-alive: a connection opened later is closed earlier."""
    async with (
        proxied(tmp_path, echo, "--head-timeout", "100ms") as (_, rig),
        connected(rig) as idle,
    ):
        await idle.send(post_and_stay(b"one"))
        assert (await idle.answer())[1] == b"one"
        async with connected(rig) as silent:
            assert await silent.rest() == b""
        await idle.send(post_and_stay(b"two"))
        assert (await idle.answer())[1] == b"two"


async def test_head_gets_the_head_alone(tmp_path: Path) -> None:
    async with proxied(tmp_path, status(200, b"12345")) as (engine, rig), connected(rig) as client:
        for _ in range(3):
            await client.send(b"HEAD /x HTTP/1.1\r\nHost: t\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 5\r\n" in head
        await client.send(post_and_stay(b"{}"))
        assert (await client.answer())[1] == b"12345"
        assert len(engine.received) == 4
