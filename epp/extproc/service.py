"""One ext_proc RPC: bytes in and out for a `Session`, with a deadline on every wait.

Who decides is injected (`RequestHandler`). Every way a stream can end, half-close, cancel, a lost
connection or our own time-out, is a normal end here: a decision that was made is finished exactly once,
one that is still awaited is cancelled. Must not know the order of messages (`session`) or their
encoding (`mutations`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from epp.core.errors import PickerError
from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc import mutations, wire
from epp.extproc.output_clock import OutputClock
from epp.extproc.phases import RequestPhase
from epp.extproc.session import GatewayProtocolError, Session

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """Who decides. All three run on the loop; the last two must not block and are never awaited."""

    async def decide(self, head: ev.RequestHead, body: bytes | None) -> ev.Routing:
        """Route one request. Cancelled when the client goes away; must then book nothing.

        Raises:
            PickerError: the client gets its status, reason and message.
        """

    def first_token(self, token: object) -> None:
        """`token` of a decision: the first output passed. At most once, before `finished`."""

    def finished(self, token: object, outcome: Outcome) -> None:
        """`token` of a decision: its stream is over. Exactly once for every `Routing` returned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one stream."""

    max_body_bytes: int = 32 * 2**20  # held in memory until the decision; above it: 413
    decision_timeout_s: float = 120.0  # backstop; queues in the handler have their own, shorter ones
    idle_timeout_s: float = 3600.0  # no message at all: longer than any answer may think
    write_timeout_s: float = 60.0  # a gateway that does not take what it asked for


@dataclass(slots=True)
class ServiceStats:
    """Counters for telemetry. `*_open` return to zero when nothing is in flight."""

    streams: int = 0
    streams_open: int = 0
    decisions: int = 0
    decisions_open: int = 0
    deciding: int = 0  # decide() is running, cancelled ones that have not ended yet included
    protocol_errors: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    degraded: Counter[ev.Degradation] = field(default_factory=Counter)


class _StreamGone(Exception):
    """The gateway cannot be written to any more. A normal end."""


class ExtProcService:
    """The ExternalProcessor service; one instance serves every stream of a server."""

    def __init__(
        self,
        handler: RequestHandler,
        limits: Limits = Limits(),
        *,
        clock: Callable[[], float] = time.monotonic,
        new_request_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.new_request_id = new_request_id
        self.stats = ServiceStats()
        self._deciding: set[asyncio.Task[ev.Routing]] = set()

    def rpc_handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE_NAME, {"Process": method})

    async def process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """The RPC (read/write API: a fifth less CPU than an async generator)."""
        await _Stream(self, context).run()

    async def settle(self, timeout_s: float) -> None:
        """Wait, bounded, until decisions that were cancelled have ended."""
        if self._deciding:
            await asyncio.wait(self._deciding, timeout=timeout_s)

    def start_decision(self, need: ev.NeedDecision) -> asyncio.Task[ev.Routing]:
        task = asyncio.create_task(self.handler.decide(need.head, need.body), name="extproc-decide")
        self._deciding.add(task)
        self.stats.deciding += 1
        task.add_done_callback(self._decision_ended)
        return task

    def _decision_ended(self, task: asyncio.Task[ev.Routing]) -> None:
        self._deciding.discard(task)
        self.stats.deciding -= 1

    def abandon(self, task: asyncio.Task[ev.Routing]) -> None:
        """Nobody waits for this decision any more. What it booked all the same is finished."""
        task.cancel()
        task.add_done_callback(self._abandoned_ended)

    def _abandoned_ended(self, task: asyncio.Task[ev.Routing]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.finish(task.result().token, Outcome())
        elif not isinstance(error, PickerError):
            log.error("deciding failed after its stream had ended", exc_info=error)

    def finish(self, token: object, outcome: Outcome) -> None:
        try:
            self.handler.finished(token, outcome)
        except Exception:
            log.exception("finished() of the request handler failed")

    def note_degraded(self, kind: ev.Degradation) -> None:
        self.stats.degraded[kind] += 1
        if self.stats.degraded[kind] == 1:  # once a process: it is the gateway's configuration
            log.warning("degraded: %s", kind.value)


class _Stream:
    """The I/O of one conversation."""

    def __init__(self, service: ExtProcService, context: grpc.aio.ServicerContext) -> None:
        self._service = service
        self._limits = service.limits
        self._stats = service.stats
        self._context = context
        self._session = Session(max_body_bytes=service.limits.max_body_bytes)
        self._started_s = service.clock()
        self._clock = OutputClock()
        self._reading: asyncio.Task[pb.ProcessingRequest] | None = None
        self._deciding: asyncio.Task[ev.Routing] | None = None
        self._routing: ev.Routing | None = None  # decided and not yet finished

    async def run(self) -> None:
        self._stats.streams += 1
        self._stats.streams_open += 1
        try:
            while not self._session.over:
                await self._perform(self._session.receive(await self._next_event()))
        except _StreamGone:
            pass
        except GatewayProtocolError as error:
            self._stats.protocol_errors += 1
            log.warning("the gateway broke the ext_proc protocol: %s", error)
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._close()

    def _close(self) -> None:
        """Synchronous, so that no cancel can stop it half-way."""
        for action in self._session.receive(ev.StreamEnded()):
            self._note(action)
        if self._deciding is not None:
            self._service.abandon(self._deciding)
        if self._reading is not None:
            self._reading.cancel()
            self._reading.add_done_callback(_retrieve)
        self._stats.streams_open -= 1

    # ---- doing what the session says ---------------------------------------------------------------

    async def _perform(self, actions: Iterable[ev.Action]) -> None:
        pending = iter(actions)
        try:
            for action in pending:
                if isinstance(action, ev.NeedDecision):
                    await self._perform(await self._decide(action))
                elif not self._note(action):
                    await self._write(action)
        finally:
            # a gateway that left during a write: what follows, the decision's end, counts all the same
            for action in pending:
                self._note(action)

    def _note(self, action: ev.Action) -> bool:
        """Take what is not for the gateway; True if it was that."""
        match action:
            case ev.MoreTokens():
                self._clock.note(self._service.clock())
            case ev.FirstToken():
                self._on_first_token()
            case ev.Finished(outcome):
                self._on_finished(outcome)
            case ev.Degraded(kind):
                self._service.note_degraded(kind)
            case _:
                return False
        return True

    def _on_first_token(self) -> None:
        self._clock.note(self._service.clock())
        if self._routing is None:
            return
        try:
            self._service.handler.first_token(self._routing.token)
        except Exception:
            log.exception("first_token() of the request handler failed")

    def _on_finished(self, outcome: Outcome) -> None:
        routing, self._routing = self._routing, None
        if routing is not None:
            self._stats.decisions_open -= 1
            self._service.finish(routing.token, self._clock.timed(outcome, self._started_s))

    async def _write(self, action: ev.Action) -> None:
        if isinstance(action, ev.SendImmediate):
            self._stats.refusals[action.refusal.reason] += 1
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await self._context.write(mutations.write(action))
        except grpc.aio.BaseError as error:
            raise _StreamGone from error
        except TimeoutError as error:
            log.warning("the gateway took no message for %s s", self._limits.write_timeout_s)
            raise _StreamGone from error

    # ---- waiting -----------------------------------------------------------------------------------

    async def _decide(self, need: ev.NeedDecision) -> list[ev.Action]:
        """Await the handler and the stream together, so that a client's leaving ends the wait."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limits.decision_timeout_s
        deciding = self._deciding = self._service.start_decision(need)
        while not deciding.done():
            reading = self._start_reading()
            left_s = max(0.0, deadline_s - loop.time())
            await asyncio.wait({deciding, reading}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await self._perform(self._session.receive(await self._next_event()))
                if self._session.over:
                    return []  # `_close` abandons the decision
            if not deciding.done() and loop.time() >= deadline_s:
                return self._timed_out(deciding)
        self._deciding = None
        return self._conclude(deciding)

    def _timed_out(self, deciding: asyncio.Task[ev.Routing]) -> list[ev.Action]:
        self._deciding = None
        self._service.abandon(deciding)
        message = f"no decision within {self._limits.decision_timeout_s:g} s"
        return self._session.refused(ev.Refusal(503, wire.REASON_TIMED_OUT, message))

    def _conclude(self, deciding: asyncio.Task[ev.Routing]) -> list[ev.Action]:
        if deciding.cancelled():
            log.error("the request handler cancelled its own decision")
            return self._session.refused(_OWN_FAULT)
        error = deciding.exception()
        if isinstance(error, PickerError):
            message = str(error) or type(error).__name__
            return self._session.refused(ev.Refusal(error.status, error.reason, message))
        if error is not None:
            log.error("deciding failed", exc_info=error)
            return self._session.refused(_OWN_FAULT)
        self._routing = deciding.result()
        self._stats.decisions += 1
        self._stats.decisions_open += 1
        return self._session.decided(self._routing)

    def _start_reading(self) -> asyncio.Task[pb.ProcessingRequest]:
        # a read must never be cancelled and begun again: gRPC allows one at a time and would lose one
        if self._reading is None:
            self._reading = asyncio.create_task(self._context.read(), name="extproc-read")
        return self._reading

    async def _next_event(self) -> ev.Event:
        reading, self._reading = self._reading, None
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                message = await (reading or self._context.read())
        except TimeoutError:
            return await self._idle()
        except grpc.aio.BaseError:
            return ev.StreamEnded()
        except DecodeError as error:
            raise GatewayProtocolError("a message that is no ProcessingRequest") from error
        if message is grpc.aio.EOF:
            return ev.StreamEnded()
        return mutations.read(message, self._service.new_request_id)

    async def _idle(self) -> ev.Event:
        """A silent gateway. What it has begun to send is refused; an answer under way is left alone."""
        log.warning("the gateway said nothing for %s s", self._limits.idle_timeout_s)
        if self._session.request_phase is RequestPhase.COLLECTING:
            message = "the request body did not arrive in time"
            await self._perform(self._session.refused(ev.Refusal(408, wire.REASON_TIMED_OUT, message)))
        return ev.StreamEnded()


_OWN_FAULT = ev.Refusal(500, wire.REASON_INTERNAL, "the endpoint picker failed to route this request")


def _retrieve(task: asyncio.Task[pb.ProcessingRequest]) -> None:
    """Look at a read nobody waits for, so that its failure is not reported as forgotten."""
    if not task.cancelled():
        task.exception()
