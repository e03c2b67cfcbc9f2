"""The conversation under every order and cut, and the field's cases (names: reference cases, A)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.phases import REQUEST_TRANSITIONS, RESPONSE_TRANSITIONS, RequestPhase, Step
from epp.extproc.session import GatewayProtocolError, LocalProtocolError, Session
from tests.unit.extproc.gateway import Gateway, cut, head

LIMIT = 1_000_000
ROUTING = ev.Routing("10.0.0.1:8000", {"x-kvpull-decision-id": "d1"}, ["x-kv-cache-source-host-port"])
REQUEST, RESPONSE = ev.Direction.REQUEST, ev.Direction.RESPONSE
OK = ev.ResponseHeaders(ev.Headers.of((":status", "200"), ("content-type", "application/json")))
SSE = ev.ResponseHeaders(
    ev.Headers.of((":status", "200"), ("content-type", "text/event-stream; charset=utf-8"))
)


def session(limit: int = LIMIT) -> Session:
    return Session(max_body_bytes=limit)


def modes(request: ev.BodyMode, response: ev.BodyMode = ev.BodyMode.FULL_DUPLEX_STREAMED) -> ev.BodyModes:
    return ev.BodyModes(request, response)


def only(actions: list[ev.Action], kind: type) -> list[ev.Action]:
    return [action for action in actions if isinstance(action, kind)]


def forwarded(body: bytes = b"{}") -> Session:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    it.receive(ev.RequestBody(body, True))
    it.decided(ROUTING)
    return it


def finish_of(actions: list[ev.Action]) -> ev.Finished:
    (finished,) = only(actions, ev.Finished)
    assert isinstance(finished, ev.Finished)
    return finished


class Exchange:
    """Our kernel and the gateway's, back to back; `turns` picks who moves next."""

    def __init__(self, gateway: Gateway, turns: list[int]) -> None:
        self.gateway, self.session, self.turns = gateway, session(), turns
        self.needs: list[ev.NeedDecision] = []
        self.notes: list[ev.Action] = []
        self.undecided: ev.NeedDecision | None = None

    def handle(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.NeedDecision):
                self.needs.append(action)
                self.undecided = action
            elif isinstance(action, ev.FirstToken | ev.MoreTokens | ev.Finished | ev.Degraded):
                self.notes.append(action)
            else:
                self.gateway.take(action)

    def run(self) -> None:
        for turn in range(10_000):
            moves = [side for side in (REQUEST, RESPONSE) if self.gateway.can_say(side)]
            options = len(moves) + (self.undecided is not None)
            if not options:
                break
            choice = (self.turns[turn % len(self.turns)] if self.turns else 0) % options
            if choice < len(moves):
                self.handle(self.session.receive(self.gateway.say(moves[choice])))
            else:
                self.undecided = None
                self.handle(self.session.decided(ROUTING))
        self.handle(self.session.receive(ev.StreamEnded()))


@dataclass(frozen=True)
class Filling:
    """A body of `size` bytes that repeats `seed`; short to print."""

    seed: bytes
    size: int

    def bytes(self) -> bytes:
        return (self.seed * (self.size // len(self.seed) + 1))[: self.size]


bodies = st.builds(
    Filling, st.binary(min_size=1, max_size=7), st.integers(0, 300) | st.integers(61_000, 200_000)
)


@settings(deadline=None)
@given(
    request=bodies,
    response=bodies,
    cuts=st.lists(st.integers(0, 200_000), max_size=6),
    empty_end=st.booleans(),
    request_trailers=st.booleans(),
    response_trailers=st.booleans(),
    content_type=st.sampled_from(["application/json", "text/event-stream"]),
    repeated_end=st.none() | st.binary(max_size=20),
    turns=st.lists(st.integers(0, 5), max_size=40),
)
def test_two_kernels_back_to_back(
    request: Filling,
    response: Filling,
    cuts: list[int],
    empty_end: bool,
    request_trailers: bool,
    response_trailers: bool,
    content_type: str,
    repeated_end: bytes | None,
    turns: list[int],
) -> None:
    sent, answered = request.bytes(), response.bytes()
    gateway = Gateway(
        cut(sent, cuts) + ([b""] if empty_end else []),
        cut(answered, cuts) + ([b""] if empty_end else []),
        request_trailers=request_trailers,
        response_trailers=response_trailers,
        content_type=content_type,
        repeated_end=repeated_end,
    )
    exchange = Exchange(gateway, turns)
    exchange.run()

    (need,) = exchange.needs
    assert need.body == (sent or None)
    assert gateway.destination == ROUTING.destination
    assert gateway.upstream.body == sent
    assert gateway.upstream.ended
    assert gateway.upstream.trailers is request_trailers
    assert gateway.client.body == answered
    assert gateway.client.ended
    assert gateway.client.trailers is response_trailers
    finished = finish_of(exchange.notes)
    assert finished.outcome.completed
    assert finished.outcome.status == 200
    if content_type == "application/json":
        assert len(only(exchange.notes, ev.FirstToken)) == bool(answered)


EVENTS = st.sampled_from(
    [
        ev.RequestHeaders(head()),
        ev.RequestHeaders(head(), True),
        ev.RequestHeaders(head(), modes=modes(ev.BodyMode.BUFFERED)),
        ev.RequestHeaders(head(), modes=modes(ev.BodyMode.NONE, ev.BodyMode.NONE)),
        ev.RequestHeaders(head(), modes=modes(ev.BodyMode.STREAMED)),
        ev.RequestBody(b"part"),
        ev.RequestBody(b"end", True),
        ev.RequestBody(b"x" * 200, True),
        ev.RequestTrailers(),
        OK,
        SSE,
        ev.ResponseBody(b"data: {}\n\n"),
        ev.ResponseBody(b"", True),
        ev.ResponseTrailers(),
        ev.StreamEnded(),
    ]
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=14), st.lists(st.sampled_from(["decide", "refuse", "wait"]), max_size=14))
def test_any_order_of_any_messages_ends_once(sent: list[ev.Event], answers: list[str]) -> None:
    """No order makes it raise anything but a protocol error, decide twice, or finish twice."""
    it = session(limit=100)
    done: list[ev.Action] = []
    pending = False
    for index, event in enumerate([*sent, ev.StreamEnded(), ev.StreamEnded()]):
        try:
            new = it.receive(event)
        except GatewayProtocolError:
            new = []
        pending = pending or bool(only(new, ev.NeedDecision))
        answer = answers[index] if index < len(answers) else "wait"
        if pending and answer != "wait" and it.request_phase is not RequestPhase.REFUSED:
            pending = False
            refusal = ev.Refusal(429, "r", "m")
            new = new + (it.decided(ROUTING) if answer == "decide" else it.refused(refusal))
        done += new
    assert len(only(done, ev.Finished)) == 1
    assert len(only(done, ev.NeedDecision)) <= 1
    assert len(only(done, ev.SendRequestHeaders) + only(done, ev.SendImmediate)) <= 1
    assert len(only(done, ev.FirstToken)) <= 1
    immediate = [index for index, action in enumerate(done) if isinstance(action, ev.SendImmediate)]
    for index in immediate:  # the last thing a gateway hears
        assert all(isinstance(action, ev.Finished) for action in done[index + 1 :])


def test_tables_are_complete_and_closed() -> None:
    assert set(REQUEST_TRANSITIONS) == set(RequestPhase)
    assert all(_can_end(phase) for phase in RequestPhase)
    for phase, row in RESPONSE_TRANSITIONS.items():
        assert Step.BODY_END in row, phase


def _can_end(phase: RequestPhase) -> bool:
    return REQUEST_TRANSITIONS[phase][Step.END] is RequestPhase.ENDED


# ---- the field's cases ---------------------------------------------------------------------------


def test_s_a01_a_second_final_body_message_is_ignored() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    assert it.receive(ev.RequestBody(b'{"model":')) == []
    (need,) = it.receive(ev.RequestBody(b'"m"}', True))
    assert isinstance(need, ev.NeedDecision)
    assert need.body == b'{"model":"m"}'
    assert it.receive(ev.RequestBody(b"any bytes", True)) == []  # while deciding
    actions = it.decided(ROUTING)
    assert only(actions, ev.SendBodyPiece) == [ev.SendBodyPiece(REQUEST, b'{"model":"m"}', True)]
    assert it.receive(ev.RequestBody(b"any bytes", True)) == []  # and after
    assert it.receive(ev.RequestBody(b"more")) == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("HEAD", "/"), ("OPTIONS", "*"), ("POST", "/v1/completions")],
)
def test_s_a05_without_a_body_the_decision_is_made_at_the_headers(method: str, path: str) -> None:
    it = session()
    fields = [("content-length", "0")] if method == "POST" else []
    (need,) = it.receive(ev.RequestHeaders(head(*fields, method=method, path=path), True))
    assert isinstance(need, ev.NeedDecision)
    assert need.body is None
    assert (need.head.method, need.head.path) == (method, path)
    (sent,) = it.decided(ROUTING)  # headers only: a body piece would be spurious
    assert isinstance(sent, ev.SendRequestHeaders)


def test_s_a05_an_empty_body_is_no_body() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head(("content-length", "0"))))
    (need,) = it.receive(ev.RequestBody(b"", True))
    assert isinstance(need, ev.NeedDecision)
    assert need.body is None
    assert it.decided(ROUTING)[1:] == [ev.SendBodyPiece(REQUEST, b"", True)]


def test_s_a06_trailers_end_a_body() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    assert it.receive(ev.RequestBody(b'{"a"')) == []
    assert it.receive(ev.RequestBody(b":1}")) == []
    (need,) = it.receive(ev.RequestTrailers())
    assert isinstance(need, ev.NeedDecision)
    assert need.body == b'{"a":1}'
    headers, piece, trailers = it.decided(ROUTING)
    assert isinstance(headers, ev.SendRequestHeaders)
    assert piece == ev.SendBodyPiece(REQUEST, b'{"a":1}', False)  # the trailers end it
    assert trailers == ev.SendTrailers(REQUEST)


def test_s_a07_no_response_body_ever() -> None:
    it = forwarded()
    assert it.receive(OK) == [ev.SendResponseHeaders(ev.HeaderEdit())]
    actions = it.receive(ev.StreamEnded())
    assert only(actions, ev.Degraded) == [ev.Degraded(ev.Degradation.NO_RESPONSE_BODY)]
    outcome = finish_of(actions).outcome
    assert (outcome.status, outcome.prompt_tokens, outcome.completed) == (200, None, False)


def test_s_a07_response_body_mode_none_is_complete_with_its_headers() -> None:
    it = session()
    announced = modes(ev.BodyMode.FULL_DUPLEX_STREAMED, ev.BodyMode.NONE)
    it.receive(ev.RequestHeaders(head(), modes=announced))
    it.receive(ev.RequestBody(b"{}", True))
    it.decided(ROUTING)
    it.receive(OK)
    actions = it.receive(ev.StreamEnded())
    assert only(actions, ev.Degraded) == [ev.Degraded(ev.Degradation.NO_RESPONSE_BODY)]
    assert finish_of(actions).outcome.completed


USAGE = (
    b'"usage":{"prompt_tokens":41,"total_tokens":48,"completion_tokens":7,'
    b'"prompt_tokens_details":{"cached_tokens":32}}'
)
EVENT_STREAM = (
    b': hello\n\ndata: {"choices":[{"text":"\\"usage\\": {"}],"usage":null}\n\n'
    b"data: {" + USAGE + b"}\n\ndata: [DONE]\n\n"
)


def _answer(parts: list[bytes], headers: ev.ResponseHeaders = SSE) -> tuple[bytes, list[ev.Action]]:
    it = forwarded()
    it.receive(headers)
    done: list[ev.Action] = []
    for index, part in enumerate(parts):
        done += it.receive(ev.ResponseBody(part, index == len(parts) - 1))
    pieces = only(done, ev.SendBodyPiece)
    return b"".join(piece.body for piece in pieces if isinstance(piece, ev.SendBodyPiece)), done


def _assert_usage(done: list[ev.Action]) -> None:
    outcome = finish_of(done).outcome
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (41, 7, 32)


def test_s_a08_usage_and_end_marker_in_different_chunks() -> None:
    position = EVENT_STREAM.index(b"data: [DONE]")
    passed, done = _answer([EVENT_STREAM[:position], EVENT_STREAM[position:]])
    assert passed == EVENT_STREAM
    _assert_usage(done)


def test_s_a08_usage_is_independent_of_every_cut() -> None:
    for offset in range(len(EVENT_STREAM) + 1):
        passed, done = _answer([EVENT_STREAM[:offset], EVENT_STREAM[offset:]])
        assert passed == EVENT_STREAM
        _assert_usage(done)
        assert len(only(done, ev.FirstToken)) == 1, offset
    passed, done = _answer([bytes([byte]) for byte in EVENT_STREAM])
    assert passed == EVENT_STREAM
    _assert_usage(done)


def test_s_a08_first_token_is_the_first_data_line_not_a_comment() -> None:
    it = forwarded()
    it.receive(SSE)
    assert not only(it.receive(ev.ResponseBody(b": keep-alive\n\n: data: no\n\nda")), ev.FirstToken)
    assert only(it.receive(ev.ResponseBody(b"ta: {}\n\n")), ev.FirstToken)
    assert not only(it.receive(ev.ResponseBody(b"data: {}\n\n")), ev.FirstToken)


def test_later_pieces_with_output_are_told_and_the_end_marker_is_none() -> None:
    it = forwarded()
    it.receive(SSE)
    told = [
        [
            type(action)
            for action in it.receive(ev.ResponseBody(piece))
            if not isinstance(action, ev.SendBodyPiece)
        ]
        for piece in (b"data: 1\n\n", b": still there\n\n", b"data: 2\n\ndata: 3\n\n", b"data: [DONE]\n\n")
    ]
    assert told == [[ev.FirstToken], [], [ev.MoreTokens], []]


def test_a_whole_answer_is_one_moment() -> None:
    it = forwarded()
    it.receive(ev.ResponseHeaders(ev.Headers.of((":status", "200"), ("content-type", "application/json"))))
    assert only(it.receive(ev.ResponseBody(b'{"data: 1')), ev.FirstToken)
    later = it.receive(ev.ResponseBody(b'\ndata: 2"}'))
    assert not only(later, ev.FirstToken)
    assert not only(later, ev.MoreTokens)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, zstd"])
def test_a_compressed_answer_is_passed_on_and_counted_as_unreadable(encoding: str) -> None:
    """No usage is guessed, even where the bytes happen to look like one."""
    it = forwarded()
    headers = ev.Headers.of(
        (":status", "200"), ("content-type", "text/event-stream"), ("content-encoding", encoding)
    )
    noted = it.receive(ev.ResponseHeaders(headers))
    assert only(noted, ev.Degraded) == [ev.Degraded(ev.Degradation.ENCODED_RESPONSE)]
    first = it.receive(ev.ResponseBody(b"\x1f\x8b"))
    assert only(first, ev.FirstToken)  # the best that can be said
    done = it.receive(ev.ResponseBody(b'"usage":{"prompt_tokens":5}', True))
    outcome = finish_of(done).outcome
    assert (outcome.prompt_tokens, outcome.completed) == (None, True)
    passed = [action.body for action in (*first, *done) if isinstance(action, ev.SendBodyPiece)]
    assert passed == [b"\x1f\x8b", b'"usage":{"prompt_tokens":5}']


def test_an_identity_encoding_is_none() -> None:
    it = forwarded()
    headers = ev.Headers.of((":status", "200"), ("content-encoding", "identity"))
    assert not only(it.receive(ev.ResponseHeaders(headers)), ev.Degraded)
    done = it.receive(ev.ResponseBody(b'{"usage":{"prompt_tokens":5}}', True))
    assert finish_of(done).outcome.prompt_tokens == 5


def test_sse_chunks_pass_at_once() -> None:
    it = forwarded()
    it.receive(SSE)
    assert it.receive(ev.ResponseBody(b"da")) == [ev.SendBodyPiece(RESPONSE, b"da", False)]


def test_an_error_answer_has_no_first_token() -> None:
    it = forwarded()
    it.receive(ev.ResponseHeaders(ev.Headers.of((":status", "503"))))
    actions = it.receive(ev.ResponseBody(b"no healthy upstream", True))
    assert not only(actions, ev.FirstToken)
    outcome = finish_of(actions).outcome
    assert (outcome.status, outcome.completed) == (503, True)


def _phases() -> dict[str, list[ev.Event]]:
    request: list[ev.Event] = [
        ev.RequestHeaders(head()),
        ev.RequestBody(b"{"),
        ev.RequestBody(b"}", True),
    ]
    response: list[ev.Event] = [SSE, ev.ResponseBody(b"data: 1\n\n"), ev.ResponseBody(b"", True)]
    return {
        "nothing": [],
        "headers": request[:1],
        "mid body": request[:2],
        "deciding or decided": request,
        "response headers": request + response[:1],
        "mid response": request + response[:2],
        "after response": request + response,
    }


@pytest.mark.parametrize("phase", _phases())
@pytest.mark.parametrize("decides", [True, False])
def test_s_a11_the_stream_may_end_in_every_phase(phase: str, decides: bool) -> None:
    it = session()
    done: list[ev.Action] = []
    for event in _phases()[phase]:
        new = it.receive(event)
        done += new
        if decides and only(new, ev.NeedDecision):
            done += it.decided(ROUTING)
    done += it.receive(ev.StreamEnded())
    assert it.over
    completed = finish_of(done).outcome.completed
    assert completed is (phase == "after response")
    assert it.decided(ROUTING) == []  # a decision that comes too late changes nothing
    assert it.receive(ev.StreamEnded()) == []


def test_s_a13_headers_are_kept_when_a_body_follows() -> None:
    fields = (("x-tenant", "t"), ("x-llm-d-inference-objective", "o"), ("x-request-id", "r-1"))
    it = session()
    it.receive(ev.RequestHeaders(head(*fields)))
    it.receive(ev.RequestBody(b"{"))
    (need,) = it.receive(ev.RequestBody(b"}", True))
    assert isinstance(need, ev.NeedDecision)
    assert [need.head.headers.first(name) for name, _ in fields] == ["t", "o", "r-1"]
    assert need.head.request_id == "r-1"


# ---- limits, modes, subset -----------------------------------------------------------------------


def test_too_large_is_refused_before_the_body_ends() -> None:
    it = session(limit=10)
    it.receive(ev.RequestHeaders(head()))
    assert it.receive(ev.RequestBody(b"0123456789")) == []
    immediate, finished = it.receive(ev.RequestBody(b"x"))
    assert isinstance(immediate, ev.SendImmediate)
    assert immediate.refusal.status == 413
    assert isinstance(finished, ev.Finished)
    assert it.over
    assert it.receive(ev.RequestBody(b"y", True)) == []


def test_too_large_by_content_length_is_refused_at_the_headers() -> None:
    it = session(limit=10)
    immediate, _ = it.receive(ev.RequestHeaders(head(("content-length", "11"))))
    assert isinstance(immediate, ev.SendImmediate)
    assert immediate.refusal.status == 413
    for odd in ("", "-1", "x", "²", "10"):
        assert session(limit=10).receive(ev.RequestHeaders(head(("content-length", odd)))) == []


def test_pieces_are_bounded_and_the_last_one_ends() -> None:
    body = bytes(range(256)) * 800
    it = session()
    it.receive(ev.RequestHeaders(head()))
    it.receive(ev.RequestBody(body, True))
    pieces = only(it.decided(ROUTING), ev.SendBodyPiece)
    assert [len(piece.body) for piece in pieces if isinstance(piece, ev.SendBodyPiece)] == [
        62_000,
        62_000,
        62_000,
        18_800,
    ]
    assert [piece.end_of_stream for piece in pieces if isinstance(piece, ev.SendBodyPiece)] == [
        False,
        False,
        False,
        True,
    ]


def test_a_body_of_whole_pieces_has_no_empty_tail() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    it.receive(ev.RequestBody(b"x" * 124_000, True))
    assert len(only(it.decided(ROUTING), ev.SendBodyPiece)) == 2


def test_a_new_body_replaces_the_old() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    it.receive(ev.RequestBody(b"old", True))
    actions = it.decided(ev.Routing("10.0.0.1:8000", body=b"new and longer"))
    assert actions[1:] == [ev.SendBodyPiece(REQUEST, b"new and longer", True)]


def test_buffered_mode_is_answered_in_its_own_form() -> None:
    it = session()
    announced = modes(ev.BodyMode.BUFFERED, ev.BodyMode.BUFFERED)
    assert it.receive(ev.RequestHeaders(head(), modes=announced)) == [ev.ContinueRequestHeaders()]
    (need,) = it.receive(ev.RequestBody(b"{}"))  # not final where trailers follow, but whole
    assert isinstance(need, ev.NeedDecision)
    (sent,) = it.decided(ROUTING)
    assert isinstance(sent, ev.SendBufferedRequest)
    assert (sent.destination, sent.body) == (ROUTING.destination, None)
    assert it.receive(ev.RequestTrailers()) == [ev.SendTrailers(REQUEST)]
    it.receive(OK)
    assert it.receive(ev.ResponseBody(b"{}", True))[0] == ev.KeepBody(RESPONSE)


def test_buffered_mode_with_trailers_and_no_body_cannot_be_routed() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head(), modes=modes(ev.BodyMode.BUFFERED)))
    immediate, _ = it.receive(ev.RequestTrailers())
    assert isinstance(immediate, ev.SendImmediate)
    assert "trailers only" in immediate.refusal.message


def test_trailers_wait_for_the_decision_in_buffered_mode() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head(), modes=modes(ev.BodyMode.BUFFERED)))
    it.receive(ev.RequestBody(b"{}"))
    assert it.receive(ev.RequestTrailers()) == []
    sent, trailers = it.decided(ROUTING)
    assert isinstance(sent, ev.SendBufferedRequest)
    assert trailers == ev.SendTrailers(REQUEST)


def test_streamed_response_mode_keeps_each_chunk() -> None:
    it = session()
    announced = modes(ev.BodyMode.FULL_DUPLEX_STREAMED, ev.BodyMode.STREAMED)
    it.receive(ev.RequestHeaders(head(), True, announced))
    it.decided(ROUTING)
    it.receive(OK)
    assert it.receive(ev.ResponseBody(b"{" + USAGE))[0] == ev.KeepBody(RESPONSE)
    done = it.receive(ev.ResponseBody(b"}", True))
    _assert_usage(done)


@pytest.mark.parametrize("mode", [ev.BodyMode.STREAMED, ev.BodyMode.BUFFERED_PARTIAL, ev.BodyMode.GRPC])
def test_modes_that_cannot_route_are_refused_on_the_first_message(mode: ev.BodyMode) -> None:
    it = session()
    immediate, _ = it.receive(ev.RequestHeaders(head(), modes=modes(mode)))
    assert isinstance(immediate, ev.SendImmediate)
    assert immediate.refusal.status == 500
    assert re.search(rf"request_body_mode {mode.name}\b.*FULL_DUPLEX", immediate.refusal.message)


def test_request_body_mode_none_routes_by_headers() -> None:
    it = session()
    announced = modes(ev.BodyMode.NONE)
    degraded, need = it.receive(ev.RequestHeaders(head(), modes=announced))
    assert degraded == ev.Degraded(ev.Degradation.NO_REQUEST_BODY)
    assert isinstance(need, ev.NeedDecision)
    assert need.body is None
    assert len(it.decided(ROUTING)) == 1


@pytest.mark.parametrize("where", ["headers", "body", "trailers"])
def test_subset_from_any_message_of_the_request(where: str) -> None:
    hint = frozenset({"10.0.0.1", "10.0.0.2:8000"})
    it = session()
    it.receive(ev.RequestHeaders(head(subset=hint if where == "headers" else None)))
    if where == "trailers":
        it.receive(ev.RequestBody(b"{}"))
        (need,) = it.receive(ev.RequestTrailers(hint))
    else:
        (need,) = it.receive(ev.RequestBody(b"{}", True, hint if where == "body" else None))
    assert isinstance(need, ev.NeedDecision)
    assert need.head.subset == hint


@pytest.mark.parametrize("hint", [frozenset(), frozenset({"10.0.0.1"})])
def test_a_subset_that_is_not_followed_means_nothing(hint: frozenset[str]) -> None:
    it = Session(max_body_bytes=100, heeds_subset=False)
    it.receive(ev.RequestHeaders(head(subset=hint)))
    (need,) = only(it.receive(ev.RequestBody(b"{}", True, subset=hint)), ev.NeedDecision)
    assert need.head.subset is None


def test_an_empty_subset_is_503_without_asking() -> None:
    it = session()
    immediate, finished = it.receive(ev.RequestHeaders(head(subset=frozenset()), True))
    assert isinstance(immediate, ev.SendImmediate)
    assert (immediate.refusal.status, immediate.refusal.reason) == (503, wire.REASON_NO_ENDPOINTS)
    assert isinstance(finished, ev.Finished)


def test_a_missing_request_id_is_set_and_a_given_one_left() -> None:
    for fields, expected in (((), "made-for-it"), ((("X-Request-Id", "mine"),), None)):
        it = session()
        it.receive(ev.RequestHeaders(head(*fields), True))
        (sent,) = it.decided(ROUTING)
        assert isinstance(sent, ev.SendRequestHeaders)
        assert sent.edit.set.get("x-request-id") == expected


# ---- the gateway's own answers -------------------------------------------------------------------


def test_an_answer_before_the_decision_passes_and_a_late_decision_is_silent() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head()))
    it.receive(ev.RequestBody(b"{}", True))
    timeout = ev.ResponseHeaders(ev.Headers.of((":status", "408")))
    assert it.receive(timeout) == [ev.SendResponseHeaders(ev.HeaderEdit())]
    assert it.receive(ev.ResponseBody(b"slow", True)) == [ev.SendBodyPiece(RESPONSE, b"slow", True)]
    assert it.decided(ROUTING) == []
    assert finish_of(it.receive(ev.StreamEnded())).outcome.status == 408


def test_a_stream_that_begins_with_the_response_passes() -> None:
    """A filter in front of ours answered: it sees the response of a request it never saw."""
    it = session()
    local = ev.ResponseHeaders(
        ev.Headers.of((":status", "429")), modes=modes(ev.BodyMode.NONE, ev.BodyMode.STREAMED)
    )
    assert it.receive(local) == [ev.SendResponseHeaders(ev.HeaderEdit())]
    assert it.receive(ev.ResponseBody(b"no", True)) == [ev.KeepBody(RESPONSE)]
    assert finish_of(it.receive(ev.StreamEnded())).outcome.status == 429


def test_refused_request_hears_nothing_more() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head(), True))
    refusal = ev.Refusal(429, "rejected-saturated", "try later")
    assert it.refused(refusal)[0] == ev.SendImmediate(refusal)
    assert it.receive(OK) == []
    assert it.receive(ev.ResponseBody(b"x", True)) == []
    assert it.receive(ev.StreamEnded()) == []


def test_impossible_messages_name_the_fault() -> None:
    with pytest.raises(GatewayProtocolError, match="request_header_mode must be SEND"):
        session().receive(ev.RequestBody(b"{}", True))
    it = forwarded()
    with pytest.raises(GatewayProtocolError, match="second request_headers"):
        it.receive(ev.RequestHeaders(head()))
    it.receive(OK)
    with pytest.raises(GatewayProtocolError, match="response_headers while"):
        it.receive(OK)
    with pytest.raises(LocalProtocolError):
        it.decided(ROUTING)


def test_response_headers_of_the_routing_are_sent() -> None:
    it = session()
    it.receive(ev.RequestHeaders(head(), True))
    it.decided(ev.Routing("10.0.0.1:8000", response_headers={"x-went": "yes"}))
    assert it.receive(OK) == [ev.SendResponseHeaders(ev.HeaderEdit({"x-went": "yes"}))]


def test_who_served_and_the_status_reach_the_outcome() -> None:
    it = forwarded()
    headers = ev.Headers.of((":status", "200"))
    done = it.receive(ev.ResponseHeaders(headers, True, "10.0.0.7:8000"))
    outcome = finish_of(done).outcome
    assert (outcome.served_by, outcome.status, outcome.completed) == ("10.0.0.7:8000", 200, True)


@pytest.mark.parametrize("mode", [ev.BodyMode.NONE, ev.BodyMode.STREAMED])
def test_where_bodies_must_be_changed_a_gateway_that_sends_none_is_refused(mode: ev.BodyMode) -> None:
    it = Session(max_body_bytes=LIMIT, needs_bodies=True)
    (answer, _) = it.receive(ev.RequestHeaders(head(), modes=modes(mode)))
    assert isinstance(answer, ev.SendImmediate)
    assert (answer.refusal.status, answer.refusal.reason) == (500, wire.REASON_UNSUPPORTED_MODE)
    assert mode.name in answer.refusal.message
    bodiless = Session(max_body_bytes=LIMIT, needs_bodies=True)
    actions = bodiless.receive(ev.RequestHeaders(head(), end_of_stream=True, modes=modes(ev.BodyMode.NONE)))
    assert [type(action) for action in actions] == [ev.NeedDecision]
    by_load = session().receive(ev.RequestHeaders(head(), modes=modes(ev.BodyMode.NONE)))  # negative control
    assert ev.NeedDecision in [type(action) for action in by_load]
