"""One straight path for a request: parse -> tokenise -> schedule -> headers. No policy in here.

Awaits room in the pool (flow control), the tokenizer and the reading of long or compressed bodies only (a
short prompt is tokenised on the spot: a thread costs more); everything else is one atomic step on the loop,
so a decision sees one state of the pool and books its load in the same breath.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from epp.core.endpoint_picker import EndpointPicker, in_subset
from epp.core.errors import NotCached, PickerError
from epp.core.types import Outcome, SchedulingDecision, SchedulingRequest
from epp.extproc.events import RequestHead, Routing
from epp.extproc.wishes import first_name, read_wishes
from epp.flow.admission import Admission, Open
from epp.request.model_rewrite import rewrite_model
from epp.request.parse import ParsedRequest, blocks_for_long, parse_request
from epp.request.pieces import prompt_pieces
from epp.request.tokenise import Tokeniser
from epp.request.trusted_salt import INLINE_BYTES as SALT_INLINE_BYTES
from epp.request.trusted_salt import TrustedSalt, salted_body
from epp.request_steps import Asked, Counted, InFlight, log_decision
from epp.request_terms import RequestTerms
from epp.routing_headers import absent_headers, destination_of, routing_headers
from epp.telemetry.metrics import PickerMetrics
from epp.telemetry.request_metrics import RequestNames
from epp.telemetry.request_trace import RequestTrace
from sidecar.tracing.spans import TRACEPARENT, Tracer

log = logging.getLogger(__name__)

_OUTPUT_WEIGHT = 2  # of an output token against one of the prompt, for fairness; as in the reference

_READ_HEADERS = ("content-type", "content-encoding")


class Director:
    """The `RequestHandler` of the ext-proc service."""

    def __init__(
        self,
        picker: EndpointPicker,
        tokeniser: Tokeniser | None,
        metrics: PickerMetrics,
        *,
        routing_key: bytes | None = None,
        tracer: Tracer | None = None,
        admission: Admission | None = None,
        terms: RequestTerms | None = None,
        trusted_salt: TrustedSalt | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokeniser` None: every request is routed by load and has no source. `trusted_salt`: replaces the
        clients' own."""
        self._picker = picker
        self._tokeniser = tokeniser
        self._metrics = metrics
        self._routing_key = routing_key
        self._tracer = tracer
        self._admission = admission or Open()
        self._terms = terms or RequestTerms()
        self._trusted_salt = trusted_salt
        metrics.attempts.pool = lambda: picker.endpoints
        self._clock = clock
        self._unix_clock = unix_clock
        self._warned = False

    def decide(self, head: RequestHead, body: bytes | None) -> Routing | Awaitable[Routing]:
        """Route one request: at once, unless a long body has to be read or tokenised in a thread, or it has
        to wait for room.

        Raises:
            PickerError: with the status and reason the client is to see.
        """
        trace = None if self._tracer is None else RequestTrace(self._tracer, head.headers)
        wishes = read_wishes(head.headers)
        asked = Asked(head, body or b"", _read_headers(head), wishes, self._clock(), trace)
        if wishes.model is not None or self._blocks_for_long(asked):
            return self._decide_long(asked)
        parsed, asked = self._understood(asked)
        if self._terms.other_model(wishes, parsed.model, head.request_id) is not None:
            return self._decide_long(asked)
        counted = self._count(asked, parsed)
        if not self._is_quick(asked, parsed) or not self._enters_at_once(counted):
            return self._decide_tokens(counted)
        token_ids = None
        if parsed.prompt is not None and self._tokeniser is not None:
            token_ids = self._tokeniser.token_ids_at_once(parsed.prompt)
        return self._route(counted, token_ids)

    def _blocks_for_long(self, asked: Asked) -> bool:
        """Whether reading the body, and changing it where a salt has to be set, belongs in a thread."""
        changes = self._trusted_salt is not None and len(asked.body) > SALT_INLINE_BYTES
        return changes or blocks_for_long(asked.body, asked.headers)

    def _is_quick(self, asked: Asked, parsed: ParsedRequest) -> bool:
        """Its tokens are known in less time than a thread needs to start; or it has none."""
        if parsed.prompt is None or self._tokeniser is None:
            return True
        plain = "content-encoding" not in asked.headers  # else a few bytes may be a long text
        return plain and self._tokeniser.answers_at_once(parsed.prompt, parsed.size_bytes)

    def _enters_at_once(self, counted: Counted) -> bool:
        try:
            return self._admission.enters_at_once(counted.asking)
        except PickerError as error:
            self._refused(counted, error)
            raise

    async def _decide_long(self, asked: Asked) -> Routing:
        try:
            parsed, asked = await asyncio.to_thread(self._read, asked)
        except PickerError as error:
            self._unread(asked, error)
            raise
        return await self._decide_tokens(self._count(asked, parsed))

    async def _decide_tokens(self, counted: Counted) -> Routing:
        """Wait for room and for the tokens. Who is refused is refused before the tokens cost anything."""
        prompt, room = counted.parsed.prompt, self._admission.admitted(counted.asking)
        try:
            await room.__aenter__()
        except PickerError as error:
            self._refused(counted, error)
            raise
        except asyncio.CancelledError:
            self._gone(counted)
            raise
        try:
            token_ids = None
            if prompt is not None and self._tokeniser is not None:
                token_ids = await self._tokeniser.token_ids(prompt)
            return self._route(counted, token_ids)
        except asyncio.CancelledError:
            self._gone(counted)
            raise
        finally:
            await room.__aexit__(None, None, None)

    def _understood(self, asked: Asked) -> tuple[ParsedRequest, Asked]:
        try:
            asked = self._salted(asked)
            return parse_request(asked.body, asked.head.path, asked.headers), asked
        except PickerError as error:
            self._unread(asked, error)
            raise

    def _unread(self, asked: Asked, error: PickerError) -> None:
        self._metrics.request.unread(error.reason)
        if asked.trace is not None:
            asked.trace.failed(error.reason)

    def _refused(self, counted: Counted, error: PickerError) -> None:
        self._metrics.request.refused(counted.series, error.reason)
        if counted.asked.trace is not None:
            counted.asked.trace.failed(error.reason)

    def _gone(self, counted: Counted) -> None:
        if counted.asked.trace is not None:
            counted.asked.trace.failed("client_gone")

    def _route(self, counted: Counted, token_ids: Sequence[int] | None) -> Routing:
        """Schedule and book in one breath."""
        asked, parsed, trace = counted.asked, counted.parsed, counted.asked.trace
        self._count_tokens(parsed, token_ids)
        if trace is not None:
            trace.tokenised(None if token_ids is None else len(token_ids))
        request = self._scheduling_request(asked.head, parsed, token_ids)
        target = self._metrics.request.label(counted.names.target)
        try:
            if asked.wishes.if_available:
                request = replace(request, subset=self._holders(request))
            started_s = self._clock()
            decision = self._picker.schedule(request, started_s, str(uuid.uuid4()))
        except PickerError as error:
            self._metrics.attempts.failed(target)
            self._refused(counted, error)
            raise
        ended_s = self._clock()
        self._metrics.decided(decision, ended_s - started_s)
        self._metrics.attempts.chosen(decision.destination, target)
        self._metrics.processing_s.observe(ended_s - asked.started_s)
        self._metrics.request.started(counted.series)
        if trace is not None:
            trace.decided(decision)
        log_decision(decision, request)
        token = InFlight(
            decision.decision_id,
            started_s,
            counted.asking,
            request.prompt_tokens,
            counted.names,
            counted.series,
            trace,
        )
        return self._routing(decision, asked, token)

    def _holders(self, request: SchedulingRequest) -> frozenset[str]:
        """Addresses of the endpoints whose cache has every whole block of the prompt.

        Raises:
            NotCached: there are none.
        """
        allowed = [e for e in self._picker.endpoints if not e.draining and in_subset(e, request.subset)]
        matches = self._picker.cache.match(request, [endpoint.id for endpoint in allowed])
        found = (e.address for e in allowed if matches[e.id].holds_whole_of(request.prompt_tokens))
        holders = frozenset(found)
        if not holders:
            raise NotCached("no endpoint has the whole prompt in its cache")
        return holders

    async def token_ids(self, path: str, body: bytes) -> Sequence[int] | None:
        """The tokens that a JSON `body` sent to `path` would be matched by; None: not known exactly. Nothing
        is decided or counted as a request.

        Raises:
            PickerError: the body would be refused.
        """
        parsed = await asyncio.to_thread(parse_request, body, path, {"content-type": "application/json"})
        if parsed.prompt is None or self._tokeniser is None:
            return None
        return await self._tokeniser.token_ids(parsed.prompt)

    def first_token(self, token: object) -> None:
        assert isinstance(token, InFlight)
        self._picker.first_token(token.decision_id)
        self._admission.wake()

    def finished(self, token: object, outcome: Outcome) -> None:
        assert isinstance(token, InFlight)
        self._picker.release(token.decision_id, outcome)
        served = token.prompt_tokens + _OUTPUT_WEIGHT * (outcome.completion_tokens or 0)
        self._admission.note_served(token.asking, served)
        self._admission.wake()
        if token.trace is not None:
            token.trace.ended(outcome)
        self._metrics.request.ended(token.series, token.names, outcome, self._clock() - token.decided_at_s)

    def _count(self, asked: Asked, parsed: ParsedRequest) -> Counted:
        identity = first_name(asked.head.headers, self._picker.identity_headers)
        asking = self._terms.asking(asked.wishes, parsed.size_bytes, identity)
        models = self._picker.models
        is_base = models.is_base(parsed.model)
        if not is_base and not models.any_known:
            self._warn_no_base_model()
        named = parsed.model if asked.rename_model is None else asked.rename_model[1]
        names = RequestNames(named, parsed.model, asking.flow, asking.priority)
        series = self._metrics.request.asked(names, parsed.size_bytes, is_base=is_base)
        if asked.rename_model is not None:
            label = self._metrics.request.label
            self._metrics.rewrites.labels(asked.renamed_by, label(names.model), label(names.target)).inc()
        return Counted(asked, parsed, asking, names, series)

    def _count_tokens(self, parsed: ParsedRequest, token_ids: Sequence[int] | None) -> None:
        if token_ids is None:
            reason = "no_tokenizer" if self._tokeniser is None else "tokenizer"
            if parsed.prompt is None:
                reason = parsed.no_prompt or "no_prompt"
            self._metrics.untokenised.labels(reason).inc()

    def _scheduling_request(
        self, head: RequestHead, parsed: ParsedRequest, token_ids: Sequence[int] | None
    ) -> SchedulingRequest:
        headers = {name: ",".join(head.headers.all(name)) for name in self._picker.header_names}
        pieces = None
        if token_ids is None and parsed.prompt is not None and self._picker.reads_placements:
            pieces = prompt_pieces(parsed.prompt)
        return SchedulingRequest(
            request_id=head.request_id,
            model=parsed.model,
            token_ids=token_ids,
            lora_name=self._picker.models.lora_name(parsed.model),
            cache_salt=parsed.cache_salt,
            size_bytes=parsed.size_bytes,
            subset=head.subset,
            pieces=pieces,
            headers={name: value for name, value in headers.items() if value},
        )

    def _warn_no_base_model(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "no engine has named its base model yet (label model_name of its gauges): requests that name "
                "a model match nothing; if this lasts, set servedModelNames of the token-producer"
            )

    def _routing(self, decision: SchedulingDecision, asked: Asked, token: InFlight) -> Routing:
        headers = routing_headers(decision, self._routing_key, self._unix_clock())
        removed = [*absent_headers(headers), *asked.removed]
        if asked.trace is not None:
            headers[TRACEPARENT] = asked.trace.context.traceparent
        if asked.rename_model is not None:
            removed.append("accept-encoding")  # a name cannot be put back into a compressed answer
        return Routing(
            destination=destination_of(decision),
            set_headers=headers,
            remove_headers=removed,
            response_headers=dict(decision.response_headers),
            body=asked.new_body,
            token=token,
            rename_model=asked.rename_model,
        )

    def _read(self, asked: Asked) -> tuple[ParsedRequest, Asked]:
        """Parse, and exchange salt and model's name where that is wanted. Blocks.

        Raises:
            PickerError: the body is refused.
        """
        asked = self._salted(asked)
        parsed = parse_request(asked.body, asked.head.path, asked.headers)
        other = self._terms.other_model(asked.wishes, parsed.model, asked.head.request_id)
        if other is None or "content-encoding" in asked.headers:
            return parsed, asked
        body = rewrite_model(asked.body, other.name)
        if body is None:
            return parsed, asked
        renamed = replace(
            asked, new_body=body, rename_model=(other.name, parsed.model), renamed_by=other.because_of
        )
        return replace(parsed, model=other.name), renamed

    def _salted(self, asked: Asked) -> Asked:
        """With the salt that the gateway vouches for; the header that said so goes no further. Blocks for
        long bodies.

        Raises:
            PickerError: the salt cannot be set.
        """
        trusted = self._trusted_salt
        if trusted is None:
            return asked
        salt, came_from = trusted.salt_of(asked.head.headers.all(trusted.header))
        body = salted_body(asked.body, asked.head.path, asked.headers, salt) if asked.body else None
        if body is None:
            return replace(asked, removed=(trusted.header,))
        self._metrics.salts.labels(came_from).inc()
        removed = (trusted.header, "content-encoding")  # what was compressed goes on decoded
        headers = {name: value for name, value in asked.headers.items() if name not in removed}
        return replace(asked, body=body, new_body=body, headers=headers, removed=removed)


def _read_headers(head: RequestHead) -> dict[str, str]:
    return {name: ",".join(head.headers.all(name)) for name in _READ_HEADERS if name in head.headers}
