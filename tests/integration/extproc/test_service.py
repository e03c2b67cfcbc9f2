"""Real gRPC over TLS: ends in every phase, refusals, deadlines, limits, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from epp.core.errors import ConfigError
from epp.extproc import wire
from epp.extproc.server import ExtProcServer, ServerSettings
from epp.extproc.service import Limits
from tests.integration.extproc import client
from tests.integration.extproc.handler import Bookkeeper

SETTINGS = ServerSettings(host="127.0.0.1", port=0, health_host="127.0.0.1", health_port=0, lame_duck_s=0.0)
STREAMS = 1_000
BATCH = 250


@asynccontextmanager
async def serving(
    handler: Bookkeeper, limits: Limits | None = None, **settings: Any
) -> AsyncIterator[tuple[ExtProcServer, grpc.aio.Channel]]:
    chosen = replace(SETTINGS, limits=limits or Limits(), **settings)
    server = ExtProcServer(handler, ready=lambda: True, settings=chosen)
    await server.start()
    try:
        async with await client.channel_to(server.port) as channel:
            yield server, channel
            await channel.close(None)
            async with asyncio.timeout(20):
                await server.drain(15)
    finally:
        await server.stop()
    assert server.stats.streams_open == 0
    assert server.stats.decisions_open == 0
    assert server.stats.deciding == 0
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not names & {"extproc-read", "extproc-decide"}
    handler.assert_books_balance()


@pytest.fixture
def handler() -> Bookkeeper:
    return Bookkeeper({"a": "10.0.0.1:8000"})


async def read(stream: Any) -> pb.ProcessingResponse:
    async with asyncio.timeout(20):
        message = await stream.read()
    assert message is not grpc.aio.EOF
    return message


async def ending(stream: Any) -> grpc.StatusCode:
    """The status the server ends the stream with; what it still says before is dropped."""
    async with asyncio.timeout(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        return await stream.code()


async def say(stream: Any, *messages: pb.ProcessingRequest) -> None:
    for message in messages:
        await stream.write(message)


async def through_request(stream: Any) -> None:
    await say(stream, client.headers(), client.body(b'{"mod'), client.body(b'el":1}', True))
    assert (await read(stream)).WhichOneof("response") == "request_headers"
    piece = (await read(stream)).request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b'{"model":1}', True)


# ---- S-A11: the end of a stream in every phase ---------------------------------------------------


async def _headers(stream: Any) -> None:
    await say(stream, client.headers())


async def _mid_body(stream: Any) -> None:
    await say(stream, client.headers(), client.body(b'{"mod'))


async def _deciding(stream: Any) -> None:
    await say(stream, client.headers(), client.body(b"{}", True))


async def _decided(stream: Any) -> None:
    await say(stream, client.headers(), client.body(b"{}", True))
    await read(stream)


async def _mid_response(stream: Any) -> None:
    await through_request(stream)
    await say(stream, client.response_headers(), client.response_body(b"data: {}\n\n"))
    assert (await read(stream)).WhichOneof("response") == "response_headers"
    assert (await read(stream)).WhichOneof("response") == "response_body"


async def _after_response(stream: Any) -> None:
    await _mid_response(stream)
    await say(stream, client.response_body(b"", True))
    assert (await read(stream)).response_body.response.body_mutation.streamed_response.end_of_stream


async def _last_write(stream: Any) -> None:
    """The gateway takes no more than the beginning: the server waits in the middle of its last answer."""
    await through_request(stream)
    await say(stream, client.response_headers(), client.response_body(b"data: " + b"x" * 300_000, True))
    assert (await read(stream)).WhichOneof("response") == "response_headers"
    assert (await read(stream)).WhichOneof("response") == "response_body"


PHASES = (_headers, _mid_body, _deciding, _decided, _mid_response, _last_write, _after_response)


class _HeadersSeen:
    """Names requests, and thereby sees that the server has read their headers."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[None] = asyncio.Queue()

    def __call__(self) -> str:
        self._arrived.put_nowait(None)
        return "a-request"

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(20):
            for _ in range(count):
                await self._arrived.get()


@pytest.mark.parametrize("half_close", [False, True], ids=["cancel", "half-close"])
@pytest.mark.parametrize("phase", PHASES)
async def test_s_a11_a_thousand_streams_end_in_each_phase(
    handler: Bookkeeper,
    phase: Callable[[Any], Any],
    half_close: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if phase is _deciding:
        handler.gate = asyncio.Event()
    streams_wanted = STREAMS if not half_close else BATCH
    seen = _HeadersSeen()
    async with serving(handler) as (server, channel):
        server.service.new_request_id = seen
        for _ in range(0, streams_wanted, BATCH):
            streams = [client.open_stream(channel) for _ in range(BATCH)]
            await asyncio.gather(*(phase(stream) for stream in streams))
            await seen.wait(BATCH)
            if phase is _deciding:
                await handler.until(lambda: handler.waiting == BATCH)
            await asyncio.gather(*(_end(stream, half_close) for stream in streams))
            if phase is _deciding:
                await handler.until(lambda: handler.waiting == 0)
    decides = phase not in (_headers, _mid_body, _deciding)
    assert server.stats.streams == streams_wanted
    assert handler.decided == (streams_wanted if decides else 0)
    assert handler.cancelled == (streams_wanted if phase is _deciding else 0)
    if phase is not _last_write:  # there the race decides; that each is finished once is the fixture's
        in_answer = phase in (_mid_response, _after_response)
        assert len(handler.first_tokens) == (streams_wanted if in_answer else 0)
        assert {outcome.completed for outcome in handler.outcomes} <= {phase is _after_response}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert server.stats.protocol_errors == 0


async def _end(stream: Any, half_close: bool) -> None:
    if half_close:
        await stream.done_writing()
        assert await ending(stream) == grpc.StatusCode.OK
    else:
        stream.cancel()


async def test_a_decision_that_ignores_its_cancel_is_still_finished_once(handler: Bookkeeper) -> None:
    handler.gate = asyncio.Event()
    async with serving(handler) as (_, channel):
        stream = client.open_stream(channel)
        await say(stream, client.headers(("x-pick", "stubborn"), end=True))
        await handler.until(lambda: handler.waiting == 1)
        await _end(stream, half_close=True)
        await handler.until(lambda: handler.finished_tokens.total() == 1)
    assert handler.decided == 1
    assert not handler.outcomes[0].completed


async def test_messages_are_taken_while_a_decision_is_awaited(handler: Bookkeeper) -> None:
    handler.gate = asyncio.Event()
    async with serving(handler) as (_, channel):
        stream = client.open_stream(channel)
        await say(stream, client.headers(), client.body(b"{}", True))
        await handler.until(lambda: handler.waiting == 1)
        await say(stream, client.body(b"again", True), client.response_headers("408"))
        # the answer to the early response proves that both were read
        assert (await read(stream)).WhichOneof("response") == "response_headers"
        handler.gate.set()
        await handler.until(lambda: handler.decided == 1)
        await _end(stream, half_close=True)
    assert handler.bodies == [b"{}"]
    assert handler.outcomes[0].status == 408


# ---- answers of our own --------------------------------------------------------------------------


async def _refused(
    channel: grpc.aio.Channel, *messages: pb.ProcessingRequest
) -> tuple[int, str, dict[str, str]]:
    stream = client.open_stream(channel)
    await say(stream, *messages)
    immediate = (await read(stream)).immediate_response
    assert await ending(stream) == grpc.StatusCode.OK
    reasons = [
        option.header.raw_value.decode()
        for option in immediate.headers.set_headers
        if option.header.key == wire.DROPPED_REASON
    ]
    return immediate.status.code, reasons[0], json.loads(immediate.body)["error"]


@pytest.mark.parametrize(
    ("pick", "status", "reason", "message"),
    [
        ("none", 503, wire.REASON_NO_ENDPOINTS, "no endpoint is ready"),
        ("saturated", 429, "rejected-saturated", "try later"),
        ("crash", 500, "internal", "the endpoint picker failed to route this request"),
    ],
)
async def test_refusals_carry_status_reason_and_sentence(
    handler: Bookkeeper,
    pick: str,
    status: int,
    reason: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(handler) as (server, channel):
        answer = await _refused(channel, client.headers(("x-pick", pick), end=True))
    assert answer[:2] == (status, reason)
    assert answer[2]["message"] == message
    assert answer[2]["code"] == reason
    assert server.stats.refusals == {reason: 1}
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == (pick == "crash")  # logged here, never told to the client


async def test_a_body_over_the_limit_is_413_before_it_ends(handler: Bookkeeper) -> None:
    async with serving(handler, Limits(max_body_bytes=10)) as (_, channel):
        answer = await _refused(channel, client.headers(), client.body(b"x" * 11))
    assert answer[:2] == (413, wire.REASON_TOO_LARGE)
    assert handler.heads == []


@pytest.mark.parametrize(("heeds", "seen"), [(True, {"10.0.0.9:1"}), (False, None)])
async def test_a_subset_may_be_none_of_our_business(
    heeds: bool, seen: set[str] | None, handler: Bookkeeper
) -> None:
    """--disable-endpoint-subset-filter, from the head and from the message that ends the body."""
    head, end = client.headers(), client.body(b"{}", end=True)
    for message in (head, end):
        fields = message.metadata_context.filter_metadata[wire.SUBSET_NAMESPACE].fields
        fields[wire.SUBSET_KEY].string_value = "10.0.0.9:1"
    async with serving(handler, Limits(heeds_subset=heeds)) as (_, channel):
        stream = client.open_stream(channel)
        await stream.write(head)
        await stream.write(end)
        answer = await read(stream)
        assert answer.WhichOneof("response") in ("request_headers", "immediate_response")
        stream.cancel()
    assert [head.subset for head in handler.heads] == [seen]


async def test_a_decision_has_a_deadline(handler: Bookkeeper) -> None:
    handler.gate = asyncio.Event()
    async with serving(handler, Limits(decision_timeout_s=0.05)) as (_, channel):
        answer = await _refused(channel, client.headers(end=True))
        await handler.until(lambda: handler.cancelled == 1)
    assert answer[:2] == (503, wire.REASON_TIMED_OUT)


async def test_a_gateway_that_stops_in_mid_body_is_let_go(handler: Bookkeeper) -> None:
    async with serving(handler, Limits(idle_timeout_s=0.05)) as (_, channel):
        answer = await _refused(channel, client.headers(), client.body(b"{"))
    assert answer[:2] == (408, wire.REASON_TIMED_OUT)


async def test_a_silent_answer_is_left_alone_and_its_load_released(handler: Bookkeeper) -> None:
    async with serving(handler, Limits(idle_timeout_s=0.2)) as (_, channel):
        stream = client.open_stream(channel)
        await through_request(stream)
        async with asyncio.timeout(20):
            assert await stream.read() is grpc.aio.EOF  # no ImmediateResponse in mid answer
            assert await stream.code() == grpc.StatusCode.OK
    assert handler.finished_tokens.total() == 1


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((client.body(b"{}", True),), "request_header_mode must be SEND"),
        ((client.headers(end=True), client.headers(end=True)), "second request_headers"),
        ((pb.ProcessingRequest(),), "neither headers, body nor trailers"),
    ],
)
async def test_a_broken_gateway_is_told_so_by_name(
    handler: Bookkeeper, messages: tuple[pb.ProcessingRequest, ...], expected: str
) -> None:
    async with serving(handler) as (server, channel):
        stream = client.open_stream(channel)
        await say(stream, *messages)
        assert await ending(stream) == grpc.StatusCode.INVALID_ARGUMENT
        assert expected in await stream.details()
    assert server.stats.protocol_errors == 1


async def test_bytes_that_are_no_message(handler: Bookkeeper) -> None:
    async with serving(handler) as (server, channel):
        stream = channel.stream_stream(client.METHOD)()
        await stream.write(b"\xff\xff\xff")
        assert await ending(stream) == grpc.StatusCode.INVALID_ARGUMENT
    assert server.stats.protocol_errors == 1


async def test_degraded_mode_is_reported_once(handler: Bookkeeper, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(handler) as (server, channel):
        for _ in range(3):  # S-A07: the stream stops after the response headers
            stream = client.open_stream(channel)
            await through_request(stream)
            await say(stream, client.response_headers())
            await read(stream)
            await _end(stream, half_close=True)
    assert sum(server.stats.degraded.values()) == 3
    assert len([record for record in caplog.records if "degraded" in record.message]) == 1


async def test_a_burst_larger_than_what_waits_by_default_is_taken_whole(handler: Bookkeeper) -> None:
    """gRPC refuses at random above 1,000 streams that nobody has accepted yet; a gateway makes that a 500."""
    async with serving(handler) as (server, channel):
        streams = [client.open_stream(channel) for _ in range(3_000)]
        faults = await asyncio.gather(*(_headers(stream) for stream in streams), return_exceptions=True)
        assert [fault for fault in faults if fault is not None] == []
        async with asyncio.timeout(60):
            while server.stats.streams < len(streams):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        for stream in streams:
            stream.cancel()


# ---- the server ----------------------------------------------------------------------------------


async def test_a_6_mb_buffered_body_passes_and_a_taken_port_is_named(handler: Bookkeeper) -> None:
    async with serving(handler) as (server, channel):
        message = client.headers()
        message.protocol_config.request_body_mode = 2
        stream = client.open_stream(channel)
        data = b"x" * 6_000_000  # over gRPC's own default of 4 MiB (S-A02, S-A15)
        await say(stream, message, client.body(data, True))
        assert (await read(stream)).HasField("request_headers")
        assert (await read(stream)).request_body.response.clear_route_cache
        assert handler.bodies == [data]
        await _end(stream, half_close=True)
        second = ExtProcServer(handler, ready=lambda: True, settings=replace(SETTINGS, port=server.port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.port}.*taken"):
            await second.start()
        await second.stop()


async def test_drain_lets_streams_end_and_takes_no_new_one(handler: Bookkeeper) -> None:
    async with serving(handler) as (server, channel):
        stream = client.open_stream(channel)
        await through_request(stream)
        draining = asyncio.create_task(server.drain(15))
        await _until_nobody_listens(server.port)
        assert not draining.done()
        await say(stream, client.response_headers(), client.response_body(b"data: 1\n\n", True))
        assert (await read(stream)).HasField("response_headers")
        assert (await read(stream)).HasField("response_body")
        await _end(stream, half_close=True)
        async with asyncio.timeout(10):
            await draining
    assert handler.outcomes[0].completed


async def _until_nobody_listens(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:  # refused, or reset where the listener closed in between
                return
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_run_ends_by_request_and_what_hangs_is_cut_at_the_deadline(handler: Bookkeeper) -> None:
    server = ExtProcServer(handler, ready=lambda: True, settings=replace(SETTINGS, drain_timeout_s=0.2))
    await server.start()
    running = asyncio.create_task(server.serve())
    channel = await client.channel_to(server.port)
    stream = client.open_stream(channel)
    await through_request(stream)
    server.request_stop()
    async with asyncio.timeout(10):
        await running
    assert server.stats.streams_open == 0
    handler.assert_books_balance()
    await channel.close()
