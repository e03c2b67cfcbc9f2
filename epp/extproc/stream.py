"""One ext_proc RPC: bytes in and out for a `Session`, with a deadline on every wait.

Every way a stream can end, half-close, cancel, a lost connection or our own time-out, is a normal end
here. Must not know the order of messages (`session`) or their encoding (`mutations`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from epp.core.errors import PickerError
from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc import mutations, wire
from epp.extproc.conversations import Conversations
from epp.extproc.deadline import Deadline
from epp.extproc.output_clock import OutputClock
from epp.extproc.phases import RequestPhase
from epp.extproc.session import GatewayProtocolError, Session

log = logging.getLogger(__name__)


class _StreamGone(Exception):
    """The gateway cannot be written to any more. A normal end."""


class ExtProcStream:
    """The I/O of one conversation."""

    def __init__(self, service: Conversations, context: grpc.aio.ServicerContext) -> None:
        self._service = service
        self._limits = service.limits
        self._stats = service.stats
        self._context = context
        self._session = Session(
            max_body_bytes=service.limits.max_body_bytes,
            heeds_subset=service.limits.heeds_subset,
            needs_bodies=service.limits.needs_bodies,
        )
        self._started_s = service.clock()
        self._clock = OutputClock()
        self._deadline = Deadline(min(self._limits.idle_timeout_s, self._limits.write_timeout_s))
        self._reading: asyncio.Task[pb.ProcessingRequest] | None = None
        self._deciding: asyncio.Task[ev.Routing] | None = None
        self._routing: ev.Routing | None = None  # decided and not yet finished

    async def run(self) -> None:
        self._stats.streams += 1
        self._stats.streams_open += 1
        code = "CANCELLED"
        try:
            while not self._session.over:
                await self._perform(self._session.receive(await self._next_event()))
            code = "OK"
        except _StreamGone:
            pass
        except GatewayProtocolError as error:
            code = "INVALID_ARGUMENT"
            self._stats.protocol_errors += 1
            log.warning("the gateway broke the ext_proc protocol: %s", error)
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._stats.note_end(code, self._service.clock() - self._started_s)
            self._close()

    def _close(self) -> None:
        """Synchronous, so that no cancel can stop it half-way."""
        self._deadline.close()
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
        self._deadline.arm(self._limits.write_timeout_s)
        try:
            await self._context.write(mutations.write(action))
        except grpc.aio.BaseError as error:
            raise _StreamGone from error
        except asyncio.CancelledError:
            if not self._deadline.take():
                raise
            log.warning("the gateway took no message for %s s", self._limits.write_timeout_s)
            raise _StreamGone from None
        finally:
            self._deadline.disarm()

    # ---- waiting -----------------------------------------------------------------------------------

    async def _decide(self, need: ev.NeedDecision) -> list[ev.Action]:
        try:
            routing = self._service.handler.decide(need.head, need.body)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            return self._failed(error)
        if isinstance(routing, ev.Routing):
            return self._decided(routing)
        return await self._await_decision(self._service.start_decision(routing))

    async def _await_decision(self, deciding: asyncio.Task[ev.Routing]) -> list[ev.Action]:
        """Await the handler and the stream together, so that a client's leaving ends the wait."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limits.decision_timeout_s
        self._deciding = deciding
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
        if deciding.cancelled():
            log.error("the request handler cancelled its own decision")
            return self._session.refused(_OWN_FAULT)
        error = deciding.exception()
        return self._decided(deciding.result()) if error is None else self._failed(error)

    def _timed_out(self, deciding: asyncio.Task[ev.Routing]) -> list[ev.Action]:
        self._deciding = None
        self._service.abandon(deciding)
        message = f"no decision within {self._limits.decision_timeout_s:g} s"
        return self._session.refused(ev.Refusal(503, wire.REASON_TIMED_OUT, message))

    def _decided(self, routing: ev.Routing) -> list[ev.Action]:
        self._routing = routing
        self._stats.decisions += 1
        self._stats.decisions_open += 1
        return self._session.decided(routing)

    def _failed(self, error: BaseException) -> list[ev.Action]:
        if isinstance(error, PickerError):
            message = str(error) or type(error).__name__
            return self._session.refused(ev.Refusal(error.status, error.reason, message))
        log.error("deciding failed", exc_info=error)
        return self._session.refused(_OWN_FAULT)

    def _start_reading(self) -> asyncio.Task[pb.ProcessingRequest]:
        # a read must never be cancelled and begun again: gRPC allows one at a time and would lose one
        if self._reading is None:
            self._reading = asyncio.create_task(self._context.read(), name="extproc-read")
        return self._reading

    async def _next_event(self) -> ev.Event:
        reading, self._reading = self._reading, None
        self._deadline.arm(self._limits.idle_timeout_s)
        try:
            message = await (reading or self._context.read())
        except asyncio.CancelledError:
            if not self._deadline.take():
                raise
            return await self._idle()
        except grpc.aio.BaseError:
            return ev.StreamEnded()
        except DecodeError as error:
            raise GatewayProtocolError("a message that is no ProcessingRequest") from error
        finally:
            self._deadline.disarm()
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
