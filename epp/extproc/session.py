"""The ext_proc conversation of one HTTP request as a state machine without I/O.

Events in, actions out, in the order they must go. Which step is legal when stands in the
tables of `phases`. Must not read a clock, parse a prompt, or know protobuf.

Order in FULL_DUPLEX_STREAMED (Envoy 1.40, checked): the headers answer is held until the body ended;
then headers, pieces of at most 62,000 bytes, trailers. Nothing goes out after the last piece: Envoy
calls that a spurious message and answers 500.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.answer import Answer, Output
from epp.extproc.body_edit import BodyEdit, edit_of, kept_or_replaced
from epp.extproc.model_name import ModelNameEdit
from epp.extproc.phases import (
    REQUEST_TRANSITIONS,
    RESPONSE_TRANSITIONS,
    RequestPhase,
    ResponsePhase,
    Step,
)


class GatewayProtocolError(Exception):
    """The gateway sent a message that has no meaning at this point. The peer's fault, not ours."""


class LocalProtocolError(Exception):
    """`decided` or `refused` was called where no decision is awaited. Our own fault."""


_ROUTABLE_MODES: Final = frozenset({ev.BodyMode.NONE, ev.BodyMode.BUFFERED, ev.BodyMode.FULL_DUPLEX_STREAMED})
_OVER: Final = frozenset({RequestPhase.REFUSED, RequestPhase.ENDED})
_OURS: Final = frozenset({Step.DECIDED, Step.REFUSE})


class Session:
    """One request. Not reusable; not thread-safe. `max_body_bytes` bounds what is held in memory;
    without `heeds_subset` the gateway's endpoint subset means nothing; `needs_bodies`: see `Limits`."""

    def __init__(self, *, max_body_bytes: int, heeds_subset: bool = True, needs_bodies: bool = False) -> None:
        self.request_phase = RequestPhase.START
        self.response_phase = ResponsePhase.WAITING
        self._max_body_bytes = max_body_bytes
        self._heeds_subset = heeds_subset
        self._routable_modes = _ROUTABLE_MODES - {ev.BodyMode.NONE} if needs_bodies else _ROUTABLE_MODES
        self._modes = ev.BodyModes()
        self._head: ev.RequestHead | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._body: bytes | None = None
        self._has_body_message = False
        self._has_trailers = False
        self._response_edit = ev.HeaderEdit()
        self._served_header: str | None = None
        self._model_name: BodyEdit | None = None
        self._answer = Answer()
        self._held = b""  # of an answer's body
        self._finished = False

    @property
    def over(self) -> bool:
        """Nothing the gateway could still say matters: the stream may be closed from our side. After a
        whole answer that spares both sides a message and us a read."""
        phase = self.request_phase
        return phase in _OVER or (
            phase is RequestPhase.FORWARDED and self.response_phase is ResponsePhase.DONE
        )

    def receive(self, event: ev.Event) -> list[ev.Action]:
        """Take one event; returns what to do, in order.

        Raises:
            GatewayProtocolError: the event is impossible here; the session stays as it was.
        """
        return list(_HANDLERS[type(event)](self, event))

    def decided(self, routing: ev.Routing) -> list[ev.Action]:
        """The handler's answer to NeedDecision."""
        self._move(Step.DECIDED)
        if self.request_phase is not RequestPhase.FORWARDED:
            return []  # too late: the gateway answered, or the stream ended
        self._response_edit = ev.HeaderEdit(routing.response_headers)
        self._served_header = routing.served_header
        if routing.rename_model is not None:
            self._model_name = ModelNameEdit(*routing.rename_model)
        return list(self._forward(routing))

    def refused(self, refusal: ev.Refusal) -> list[ev.Action]:
        """The handler's other answer to NeedDecision."""
        return list(self._refuse(refusal))

    # ---- request half ----------------------------------------------------------------------------

    def _on_request_headers(self, event: ev.RequestHeaders) -> Iterator[ev.Action]:
        if self.request_phase is not RequestPhase.START:
            raise GatewayProtocolError("a second request_headers message in one stream")
        self._head = event.head if self._heeds_subset else replace(event.head, subset=None)
        self._modes = event.modes or self._modes
        alone = event.end_of_stream or self._modes.request is ev.BodyMode.NONE
        self._move(Step.HEADERS_ALONE if alone else Step.HEADERS)
        refusal = self._refusal_at_headers(body_follows=not event.end_of_stream)
        if refusal is not None:
            yield from self._refuse(refusal)
            return
        if not alone:
            if self._modes.request is ev.BodyMode.BUFFERED:
                yield ev.ContinueRequestHeaders()
            return
        if not event.end_of_stream:
            yield ev.Degraded(ev.Degradation.NO_REQUEST_BODY)
        yield from self._need_decision()

    def _refusal_at_headers(self, *, body_follows: bool) -> ev.Refusal | None:
        modes = self._modes
        if body_follows and modes.request not in self._routable_modes:
            return _unsupported("request_body_mode", modes.request)
        if modes.response is ev.BodyMode.GRPC:
            return _unsupported("response_body_mode", modes.response)
        assert self._head is not None
        length = self._head.headers.first("content-length") or ""
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return self._too_large()
        return None

    def _on_request_body(self, event: ev.RequestBody) -> Iterator[ev.Action]:
        self._require_head("request_body")
        if self.request_phase is not RequestPhase.COLLECTING:
            self._move(Step.BODY)
            return
        self._has_body_message = True
        self._note_subset(event.subset)
        self._size_bytes += len(event.body)
        if self._size_bytes > self._max_body_bytes:
            yield from self._refuse(self._too_large())
            return
        self._pieces.append(event.body)
        if event.end_of_stream or self._modes.request is ev.BodyMode.BUFFERED:
            self._move(Step.BODY_END)
            yield from self._need_decision()
        else:
            self._move(Step.BODY)

    def _on_request_trailers(self, event: ev.RequestTrailers) -> Iterator[ev.Action]:
        self._require_head("request_trailers")
        phase, mode = self.request_phase, self._modes.request
        self._move(Step.TRAILERS)
        self._note_subset(event.subset)
        if phase is RequestPhase.COLLECTING and mode is ev.BodyMode.BUFFERED:
            # no body message came, and the headers were answered already: nowhere to put a route
            yield from self._refuse(_unsupported("a request of headers and trailers only and", mode))
        elif phase is RequestPhase.COLLECTING:
            self._has_trailers = True
            yield from self._need_decision()
        elif phase is RequestPhase.DECIDING and mode is not ev.BodyMode.FULL_DUPLEX_STREAMED:
            self._has_trailers = True
        elif phase is RequestPhase.FORWARDED and mode is not ev.BodyMode.FULL_DUPLEX_STREAMED:
            yield ev.SendTrailers(ev.Direction.REQUEST)

    def _need_decision(self) -> Iterator[ev.Action]:
        assert self._head is not None
        self._body = b"".join(self._pieces) or None
        self._pieces.clear()
        if self._head.subset is not None and not self._head.subset:
            message = "the gateway's endpoint subset for this request is empty"
            yield from self._refuse(ev.Refusal(503, wire.REASON_NO_ENDPOINTS, message))
            return
        yield ev.NeedDecision(self._head, self._body)

    def _forward(self, routing: ev.Routing) -> Iterator[ev.Action]:
        body = self._body if routing.body is None else routing.body
        self._body = None
        edit = self._request_edit(routing)
        if self._has_body_message and self._modes.request is ev.BodyMode.BUFFERED:
            yield ev.SendBufferedRequest(routing.destination, edit, routing.body)
        else:
            yield ev.SendRequestHeaders(routing.destination, edit)
        duplex = self._modes.request is ev.BodyMode.FULL_DUPLEX_STREAMED
        if duplex and self._has_body_message and (body or not self._has_trailers):
            yield from _pieces(ev.Direction.REQUEST, body or b"", end_of_stream=not self._has_trailers)
        if self._has_trailers:
            yield ev.SendTrailers(ev.Direction.REQUEST)

    def _request_edit(self, routing: ev.Routing) -> ev.HeaderEdit:
        assert self._head is not None
        to_set = dict(routing.set_headers)
        if not self._head.headers.first(wire.REQUEST_ID):
            to_set.setdefault(wire.REQUEST_ID, self._head.request_id)
        return ev.HeaderEdit(to_set, routing.remove_headers)

    def _note_subset(self, subset: frozenset[str] | None) -> None:
        if subset is not None and self._head is not None and self._heeds_subset:
            self._head = replace(self._head, subset=subset)

    def _too_large(self) -> ev.Refusal:
        message = f"the request body is larger than {self._max_body_bytes} bytes"
        return ev.Refusal(413, wire.REASON_TOO_LARGE, message)

    def _refuse(self, refusal: ev.Refusal) -> Iterator[ev.Action]:
        self._move(Step.REFUSE)
        if self.request_phase is not RequestPhase.REFUSED:
            return  # too late
        self._pieces.clear()
        self._body = None
        yield ev.SendImmediate(refusal)
        yield from self._finish(status=refusal.status)

    # ---- response half ---------------------------------------------------------------------------

    def _on_response_headers(self, event: ev.ResponseHeaders) -> Iterator[ev.Action]:
        if not self._enter_response("response_headers", _ending(event, Step.HEADERS, Step.HEADERS_ALONE)):
            return
        self._modes = event.modes or self._modes
        self._answer.begin(event)
        if self._answer.good and self._answer.encoded:
            yield ev.Degraded(ev.Degradation.ENCODED_RESPONSE)
        if self._model_name is not None:
            self._model_name = edit_of(self._model_name, self._answer.encodings, self._modes.response)
        yield ev.SendResponseHeaders(self._edit_response(event.served_by))
        yield from self._finish_if_done()

    def _edit_response(self, served_by: str | None) -> ev.HeaderEdit:
        if self._served_header is None:
            return self._response_edit
        served = served_by or wire.SERVED_UNKNOWN
        return ev.HeaderEdit({**self._response_edit.set, self._served_header: served})

    def _on_response_body(self, event: ev.ResponseBody) -> Iterator[ev.Action]:
        if not self._enter_response("response_body", _ending(event, Step.BODY, Step.BODY_END)):
            return
        if self._modes.response is ev.BodyMode.FULL_DUPLEX_STREAMED:
            yield from self._pass_body(event)
        else:
            yield kept_or_replaced(self._model_name, event.body, self._modes.response)
        output = self._answer.feed(event.body)
        if output is not Output.NONE:
            yield ev.FirstToken() if output is Output.FIRST else ev.MoreTokens()
        yield from self._finish_if_done()

    def _pass_body(self, event: ev.ResponseBody) -> Iterator[ev.Action]:
        """HTTP/1.1 ends a body with an empty message of its own: a short document waits for that, and goes
        back in one message instead of two."""
        body = event.body
        if self._model_name is not None:
            body = self._model_name.feed(body, end=event.end_of_stream)
            if not body and not event.end_of_stream:
                return
        body = self._held + body
        if not event.end_of_stream and len(body) <= self._answer.may_hold_bytes:
            self._held = body
            return
        self._held = b""
        yield from _pieces(ev.Direction.RESPONSE, body, end_of_stream=event.end_of_stream)

    def _on_response_trailers(self, _: ev.ResponseTrailers) -> Iterator[ev.Action]:
        if self._enter_response("response_trailers", Step.TRAILERS):
            if self._model_name is not None:
                self._held += self._model_name.feed(b"", end=True)
            if self._held:
                yield ev.SendBodyPiece(ev.Direction.RESPONSE, self._held, end_of_stream=False)
            yield ev.SendTrailers(ev.Direction.RESPONSE)
            yield from self._finish_if_done()

    def _enter_response(self, message: str, step: Step) -> bool:
        """Move the response half; False: it had ended, or the conversation is over. No answer then."""
        following = RESPONSE_TRANSITIONS[self.response_phase].get(step)
        if following is None:
            raise GatewayProtocolError(f"{message} while the response is {self.response_phase.value}")
        ended = self.response_phase is ResponsePhase.DONE
        self._move(Step.BYPASS)
        if ended or self.request_phase in _OVER:
            return False
        self.response_phase = following
        return True

    # ---- ends ------------------------------------------------------------------------------------

    def _on_stream_ended(self, _: ev.StreamEnded) -> Iterator[ev.Action]:
        forwarded = self.request_phase is RequestPhase.FORWARDED
        self._move(Step.END)
        self._pieces.clear()
        self._body = None
        unseen = forwarded and self._answer.good and not self._answer.has_body
        if unseen and self.response_phase is ResponsePhase.BODY and not self._finished:
            yield ev.Degraded(ev.Degradation.NO_RESPONSE_BODY)
        yield from self._finish()

    def _finish_if_done(self) -> Iterator[ev.Action]:
        # bypassed: a late decision may still come, so that the stream's end has to finish it.
        if self.response_phase is ResponsePhase.DONE and self.request_phase is RequestPhase.FORWARDED:
            yield from self._finish()

    def _finish(self, status: int | None = None) -> Iterator[ev.Action]:
        if self._finished:
            return
        self._finished = True
        whole = self.response_phase is ResponsePhase.DONE
        unseen = self._modes.response is ev.BodyMode.NONE and self._answer.status is not None
        outcome = self._answer.outcome(completed=whole or unseen)
        yield ev.Finished(replace(outcome, status=status) if status is not None else outcome)

    def _require_head(self, message: str) -> None:
        if self._head is None and self.request_phase is not RequestPhase.ENDED:
            raise GatewayProtocolError(f"{message} before request_headers: request_header_mode must be SEND")

    def _move(self, step: Step) -> None:
        following = REQUEST_TRANSITIONS[self.request_phase].get(step)
        if following is None:
            error = LocalProtocolError if step in _OURS else GatewayProtocolError
            raise error(f"{step.value} while the request is {self.request_phase.value}")
        self.request_phase = following


def _ending(event: ev.ResponseHeaders | ev.ResponseBody, going_on: Step, ending: Step) -> Step:
    return ending if event.end_of_stream else going_on


def _pieces(direction: ev.Direction, body: bytes, *, end_of_stream: bool) -> Iterator[ev.Action]:
    """The body in pieces a gateway accepts, one (perhaps empty) at least; the end is on the last."""
    size = wire.MAX_BODY_CHUNK_BYTES
    for start in range(0, max(len(body), 1), size):
        last = start + size >= len(body)
        yield ev.SendBodyPiece(direction, body[start : start + size], end_of_stream and last)


def _unsupported(setting: str, mode: ev.BodyMode) -> ev.Refusal:
    message = (
        f"the gateway's ext_proc filter has {setting} {mode.name}; this endpoint picker needs "
        "FULL_DUPLEX_STREAMED"
    )
    return ev.Refusal(500, wire.REASON_UNSUPPORTED_MODE, message)


_HANDLERS: Final[Mapping[type, Callable[..., Iterator[ev.Action]]]] = {
    ev.RequestHeaders: Session._on_request_headers,
    ev.RequestBody: Session._on_request_body,
    ev.RequestTrailers: Session._on_request_trailers,
    ev.ResponseHeaders: Session._on_response_headers,
    ev.ResponseBody: Session._on_response_body,
    ev.ResponseTrailers: Session._on_response_trailers,
    ev.StreamEnded: Session._on_stream_ended,
}
