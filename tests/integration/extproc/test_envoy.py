"""The gateway side against a real Envoy 1.40: what clients and engines really get."""

from __future__ import annotations

import asyncio
import io
import os

import aiohttp
import pytest

from epp.extproc import wire
from epp.extproc.service import Limits
from tests.integration.extproc.conftest import Gateway
from tests.integration.extproc.upstream import ANSWER, EVENTS

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT = aiohttp.ClientTimeout(total=30)


async def ask(
    gateway: Gateway,
    method: str = "POST",
    path: str = "/v1/completions",
    *,
    via: str = "duplex",
    data: object = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    data = io.BytesIO(data) if isinstance(data, bytes) else data
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as session,
        session.request(method, gateway.urls[via] + path, data=data, headers=fields) as answer,
    ):
        body = await answer.read()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, body


async def _chunks(data: bytes) -> object:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


@pytest.mark.parametrize("size", [0, 1, 62_000, 62_001, 300_000, 3_000_000, 32_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_arrive_byte_identical_at_the_destination(
    gateway: Gateway, size: int, chunked: bool
) -> None:
    data = os.urandom(size)
    sent: object = _chunks(data) if chunked else data
    status, headers, body = await ask(gateway, data=sent, x_pick="b")
    assert (status, body) == (200, ANSWER)
    assert headers["x-upstream"] == "b"
    assert headers["x-decided"] == "1"
    assert gateway.upstreams["b"].bodies == [data]
    assert gateway.upstreams["a"].bodies == []
    assert gateway.handler.bodies == [data or None]  # asked once, with the whole body


async def test_the_outcome_tells_what_happened(gateway: Gateway) -> None:
    await ask(gateway, data=b"{}", x_pick="b", x_request_id="mine")
    handler = gateway.handler
    await handler.until(lambda: len(handler.outcomes) == 1)
    (outcome,) = handler.outcomes
    assert (outcome.status, outcome.completed) == (200, True)
    assert outcome.served_by == gateway.upstreams["b"].address
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 1)
    assert outcome.ttft_s is not None
    assert handler.heads[0].request_id == "mine"
    assert gateway.upstreams["b"].headers[0]["x-request-id"] == "mine"


async def test_sse_passes_byte_identical_and_at_once(gateway: Gateway) -> None:
    upstream, handler = gateway.upstreams["a"], gateway.handler
    upstream.hold = asyncio.Event()
    received = b""
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(gateway.urls["duplex"] + "/stream", data=b"{}") as answer,
    ):
        while received != b"".join(EVENTS[:2]):  # passed on although the stream stands still
            received += await answer.content.readany()
        await handler.until(lambda: handler.first_tokens.total() == 1)
        assert handler.outcomes == []
        upstream.hold.set()
        received += await answer.content.read()
    assert received == b"".join(EVENTS)
    await handler.until(lambda: len(handler.outcomes) == 1)
    (outcome,) = handler.outcomes
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (41, 7, 32)
    assert outcome.completed


async def test_a_client_that_leaves_ends_its_request(gateway: Gateway) -> None:
    upstream, handler = gateway.upstreams["a"], gateway.handler
    upstream.hold = asyncio.Event()
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        answer = await session.post(gateway.urls["duplex"] + "/stream", data=b"{}")
        await answer.content.readexactly(len(EVENTS[0]))
        answer.close()
    await handler.until(lambda: len(handler.outcomes) == 1)
    assert not handler.outcomes[0].completed
    upstream.hold.set()


async def test_a_client_that_leaves_ends_the_wait_for_a_decision(gateway: Gateway) -> None:
    handler = gateway.handler
    handler.gate = asyncio.Event()
    asking = asyncio.create_task(ask(gateway, data=b"{}"))
    await handler.until(lambda: handler.waiting == 1)
    asking.cancel()
    await handler.until(lambda: handler.cancelled == 1)
    assert handler.decided == 0
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
async def test_a_request_without_a_body_is_decided_at_the_headers(gateway: Gateway, method: str) -> None:
    status, headers, _ = await ask(gateway, method, "/v1/models", x_pick="b")
    assert (status, headers["x-upstream"]) == (200, "b")
    assert gateway.handler.bodies == [None]
    assert gateway.handler.heads[0].method == method


async def test_client_sent_routing_headers_do_not_reach_the_engine(gateway: Gateway) -> None:
    await ask(
        gateway,
        data=b"{}",
        x_kv_cache_source_host_port="10.9.9.9:8000",
        x_gateway_destination_endpoint="127.0.0.1:1",
        x_kvpull_decision_id="forged",
        x_tenant="kept",
    )
    (headers,) = gateway.upstreams["a"].headers
    assert "x-kv-cache-source-host-port" not in headers
    assert headers[wire.DESTINATION] == gateway.upstreams["a"].address
    assert headers["x-kvpull-decision-id"] == "decision-1"
    assert headers["x-tenant"] == "kept"
    assert headers[wire.REQUEST_ID]
    assert gateway.handler.heads[0].headers.first("x-tenant") == "kept"


@pytest.mark.parametrize("data", [None, b"{}"])
@pytest.mark.parametrize(
    ("pick", "status", "reason"),
    [("none", 503, wire.REASON_NO_ENDPOINTS), ("saturated", 429, "rejected-saturated")],
)
async def test_refusals_reach_the_client(
    gateway: Gateway, data: bytes | None, pick: str, status: int, reason: str
) -> None:
    got, headers, body = await ask(gateway, data=data, x_pick=pick)
    assert (got, headers[wire.DROPPED_REASON]) == (status, reason)
    assert headers["content-type"] == "application/json"
    assert b'"error"' in body
    assert gateway.upstreams["a"].bodies == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(gateway: Gateway, chunked: bool) -> None:
    data = b"x" * (Limits().max_body_bytes + 1)
    sent: object = _chunks(data) if chunked else data
    status, headers, _ = await ask(gateway, data=sent)
    assert (status, headers[wire.DROPPED_REASON]) == (413, wire.REASON_TOO_LARGE)
    assert gateway.handler.heads == []


async def test_envoys_own_503_passes_and_is_an_outcome(gateway: Gateway) -> None:
    status, _, _ = await ask(gateway, data=b"{}", x_pick="closed")
    assert status == 503
    handler = gateway.handler
    await handler.until(lambda: len(handler.outcomes) == 1)
    assert (handler.outcomes[0].status, handler.outcomes[0].completed) == (503, True)
    assert handler.first_tokens == {}


async def test_a_filter_in_front_that_answers_is_passed(gateway: Gateway) -> None:
    """It sees the response of a request that never came to us; a protocol error would make it a 500."""
    status, _, _ = await ask(gateway, via="fault", x_envoy_fault_abort_request="418")
    assert status == 418
    assert gateway.handler.heads == []


@pytest.mark.parametrize("new", [None, b"short", b"longer " * 100_000])
@pytest.mark.parametrize("via", ["buffered", "duplex"])
async def test_s_a10_bodies_may_change_their_length(gateway: Gateway, via: str, new: bytes | None) -> None:
    gateway.handler.new_body = new
    data = b"0123456789" * 10_000
    status, headers, body = await ask(gateway, via=via, data=data, x_pick="b")
    assert (status, headers["x-upstream"], body) == (200, "b", ANSWER)
    assert gateway.upstreams["b"].bodies == [new or data]


async def test_s_a10_a_chunked_body_may_change_its_length_in_buffered_mode(gateway: Gateway) -> None:
    gateway.handler.new_body = b"other"
    status, _, _ = await ask(gateway, via="buffered", data=_chunks(b"abc"))
    assert status == 200
    assert gateway.upstreams["a"].bodies == [b"other"]


async def test_s_a04_streamed_mode_says_what_is_wrong(gateway: Gateway) -> None:
    status, headers, body = await ask(gateway, via="streamed", data=b"{}")
    assert (status, headers[wire.DROPPED_REASON]) == (500, wire.REASON_UNSUPPORTED_MODE)
    assert b"request_body_mode STREAMED; this endpoint picker needs FULL_DUPLEX_STREAMED" in body
    status, _, body = await ask(gateway, "GET", "/v1/models", via="streamed")
    assert (status, body) == (200, ANSWER)


async def test_s_a07_without_response_bodies_requests_still_end(gateway: Gateway) -> None:
    status, _, body = await ask(gateway, "POST", "/stream", via="no_response", data=b"{}")
    assert (status, body) == (200, b"".join(EVENTS))
    handler = gateway.handler
    await handler.until(lambda: len(handler.outcomes) == 1)
    assert (handler.outcomes[0].completed, handler.outcomes[0].prompt_tokens) == (True, None)


@pytest.mark.parametrize("parts", [[b'{"a":', b"1}"], []])
async def test_s_a06_trailers_end_a_body(gateway: Gateway, parts: list[bytes]) -> None:
    host, port = gateway.urls["duplex"].removeprefix("http://").split(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for part in parts:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        writer.write(b"0\r\nx-checksum: 7\r\n\r\n")
        await writer.drain()
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert status == b"HTTP/1.1 200 OK\r\n"
    assert gateway.upstreams["a"].bodies == [b"".join(parts)]
    assert gateway.handler.bodies == [b"".join(parts) or None]


async def test_two_hundred_requests_at_once(gateway: Gateway) -> None:
    """Exactly one end flag each: no body truncated, doubled or swapped (S-A03)."""
    bodies = [os.urandom(200_000 + index) for index in range(200)]
    answers = await asyncio.gather(*(ask(gateway, data=data) for data in bodies))
    assert {(status, body) for status, _, body in answers} == {(200, ANSWER)}
    assert sorted(gateway.upstreams["a"].bodies) == sorted(bodies)
