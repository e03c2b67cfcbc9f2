"""The service around the session: however a stream ends, its decision is finished exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from epp.core.types import Outcome
from epp.extproc.events import RequestHead, Routing
from epp.extproc.service import ExtProcService


class RecordingHandler:
    """Decides at once; remembers what it was told."""

    def __init__(self) -> None:
        self.finished_tokens: list[object] = []
        self.outcomes: list[Outcome] = []

    async def decide(self, head: RequestHead, body: bytes | None) -> Routing:
        return Routing("10.0.0.1:8000", token=head.request_id)

    def first_token(self, token: object) -> None:
        """Not of interest here."""

    def finished(self, token: object, outcome: Outcome) -> None:
        self.finished_tokens.append(token)
        self.outcomes.append(outcome)


class LeavingGateway:
    """A stream context that sends `messages` and is gone, as a cancel, at write number `leaves_at`."""

    def __init__(self, messages: Sequence[pb.ProcessingRequest], leaves_at: int | None) -> None:
        self._messages = list(messages)
        self._leaves_at = leaves_at
        self.written: list[pb.ProcessingResponse] = []
        self._forwarded = asyncio.Event()  # an upstream answers what it has been sent, not before

    async def read(self) -> object:
        if not self._messages:
            return grpc.aio.EOF
        if self._messages[0].WhichOneof("request").startswith("response"):
            await self._forwarded.wait()
        return self._messages.pop(0)

    async def write(self, message: pb.ProcessingResponse) -> None:
        if len(self.written) == self._leaves_at:
            raise asyncio.CancelledError
        self.written.append(message)
        if len(self.written) == 2:  # headers and body of the request
            self._forwarded.set()


def conversation() -> list[pb.ProcessingRequest]:
    request = pb.ProcessingRequest()
    for name, value in ((":method", b"POST"), (":path", b"/v1/completions"), ("x-request-id", b"r1")):
        request.request_headers.headers.headers.add(key=name, raw_value=value)
    body = pb.ProcessingRequest()
    body.request_body.body = b"{}"
    body.request_body.end_of_stream = True
    response = pb.ProcessingRequest()
    response.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    answer = pb.ProcessingRequest()
    answer.response_body.body = b"{}"
    answer.response_body.end_of_stream = True
    return [request, body, response, answer]


async def run(leaves_at: int | None) -> tuple[ExtProcService, RecordingHandler, LeavingGateway]:
    handler = RecordingHandler()
    service = ExtProcService(handler)
    gateway = LeavingGateway(conversation(), leaves_at)
    try:
        await service.process(None, gateway)
    except asyncio.CancelledError:
        assert leaves_at is not None
    return service, handler, gateway


async def test_a_whole_conversation_is_finished_once() -> None:
    service, handler, gateway = await run(None)
    assert len(gateway.written) == 4
    assert handler.finished_tokens == ["r1"]
    assert handler.outcomes[0].completed
    assert service.stats.decisions_open == service.stats.streams_open == 0


@pytest.mark.parametrize("leaves_at", [0, 1, 2, 3])
async def test_a_gateway_that_leaves_during_any_write_leaves_no_decision_open(leaves_at: int) -> None:
    """Seen with a real Envoy: it closed streams while the last piece of the answer was being written, and the
    end of the decision was lost with that write."""
    service, handler, _ = await run(leaves_at)
    assert handler.finished_tokens == ["r1"]
    assert service.stats.decisions_open == service.stats.streams_open == 0


async def test_times_of_a_streamed_answer_reach_the_handler() -> None:
    """On a clock that moves by one second whenever it is read."""
    seconds = iter(range(1000))
    handler = RecordingHandler()
    service = ExtProcService(handler, clock=lambda: float(next(seconds)))
    request, body, headers, _ = conversation()
    headers.response_headers.headers.headers.add(key="content-type", raw_value=b"text/event-stream")
    pieces = []
    for text in (b"data: 1\n\n", b"data: 2\n\n", b": quiet\n\n", b"data: 3\n\n"):
        piece = pb.ProcessingRequest()
        piece.response_body.body = text
        pieces.append(piece)
    pieces[-1].response_body.end_of_stream = True
    await service.process(None, LeavingGateway([request, body, headers, *pieces], None))
    (outcome,) = handler.outcomes
    assert outcome.ttft_s == 1.0
    assert outcome.output is not None
    assert outcome.output.first_to_last_s == 2.0
    assert sum(outcome.output.gap_counts) == 2
