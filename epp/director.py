"""One straight path for a request: parse -> tokenise -> schedule -> headers. No policy in here.

Awaits the tokenizer and the reading of long or compressed bodies only (a short prompt is tokenised on the
spot: a thread costs more); everything else is one atomic step on the loop, so a decision sees one state
of the pool and books its load in the same breath.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from epp.core.endpoint_picker import EndpointPicker, in_subset
from epp.core.errors import NotCached, PickerError
from epp.core.types import Outcome, SchedulingDecision, SchedulingRequest
from epp.extproc.events import RequestHead, Routing
from epp.extproc.wishes import Wishes, read_wishes
from epp.request.model_rewrite import rewrite_model
from epp.request.parse import ParsedRequest, blocks_for_long, parse_request
from epp.request.tokenise import Tokeniser
from epp.telemetry.metrics import PickerMetrics
from epp.telemetry.request_metrics import RequestNames, RequestSeries
from epp.telemetry.request_trace import RequestTrace
from sidecar import wire as sidecar_wire
from sidecar.routing_auth import RoutingClaims, sign_routing
from sidecar.tracing.spans import TRACEPARENT, Tracer

log = logging.getLogger(__name__)

_READ_HEADERS = ("content-type", "content-encoding")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What `first_token` and `finished` need to know of a decision."""

    decision_id: str
    decided_at_s: float
    names: RequestNames
    series: RequestSeries
    trace: RequestTrace | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its way through the director. `headers`: those that say how to read the body."""

    head: RequestHead
    body: bytes
    headers: Mapping[str, str]
    wishes: Wishes
    started_s: float
    trace: RequestTrace | None
    new_body: bytes | None = None
    rename_model: tuple[str, str] | None = None


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
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokeniser` None: every request is routed by load and has no source."""
        self._picker = picker
        self._tokeniser = tokeniser
        self._metrics = metrics
        self._routing_key = routing_key
        self._tracer = tracer
        metrics.attempts.pool = lambda: picker.endpoints
        self._clock = clock
        self._unix_clock = unix_clock
        self._warned = False

    def decide(self, head: RequestHead, body: bytes | None) -> Routing | Awaitable[Routing]:
        """Route one request: at once, unless a long body has to be read or tokenised in a thread.

        Raises:
            PickerError: with the status and reason the client is to see.
        """
        trace = None if self._tracer is None else RequestTrace(self._tracer, head.headers)
        wishes = read_wishes(head.headers)
        asked = _Asked(head, body or b"", _read_headers(head), wishes, self._clock(), trace)
        if asked.wishes.model is not None or blocks_for_long(asked.body, asked.headers):
            return self._decide_long(asked)
        parsed = self._understood(asked)
        prompt = parsed.prompt
        if prompt is None or self._tokeniser is None:
            return self._route(asked, parsed, None)
        plain = "content-encoding" not in asked.headers  # else a few bytes may be a long text
        if plain and self._tokeniser.answers_at_once(prompt, parsed.size_bytes):
            return self._route(asked, parsed, self._tokeniser.token_ids_at_once(prompt))
        return self._decide_tokens(asked, parsed)

    async def _decide_long(self, asked: _Asked) -> Routing:
        try:
            parsed, asked = await asyncio.to_thread(_read, asked)
        except PickerError as error:
            self._unread(asked, error)
            raise
        return await self._decide_tokens(asked, parsed)

    async def _decide_tokens(self, asked: _Asked, parsed: ParsedRequest) -> Routing:
        token_ids = None
        try:
            if parsed.prompt is not None and self._tokeniser is not None:
                token_ids = await self._tokeniser.token_ids(parsed.prompt)
        except asyncio.CancelledError:
            if asked.trace is not None:
                asked.trace.failed("client_gone")
            raise
        return self._route(asked, parsed, token_ids)

    def _understood(self, asked: _Asked) -> ParsedRequest:
        try:
            return parse_request(asked.body, asked.head.path, asked.headers)
        except PickerError as error:
            self._unread(asked, error)
            raise

    def _unread(self, asked: _Asked, error: PickerError) -> None:
        self._metrics.request.unread(error.reason)
        if asked.trace is not None:
            asked.trace.failed(error.reason)

    def _route(self, asked: _Asked, parsed: ParsedRequest, token_ids: Sequence[int] | None) -> Routing:
        """Schedule and book in one breath."""
        names, series = self._count(asked, parsed, token_ids)
        trace = asked.trace
        if trace is not None:
            trace.tokenised(None if token_ids is None else len(token_ids))
        request = self._scheduling_request(asked.head, parsed, token_ids)
        target = self._metrics.request.label(names.target)
        try:
            if asked.wishes.if_available:
                request = replace(request, subset=self._holders(request))
            started_s = self._clock()
            decision = self._picker.schedule(request, started_s, str(uuid.uuid4()))
        except PickerError as error:
            self._metrics.attempts.failed(target)
            self._metrics.request.refused(series, error.reason)
            if trace is not None:
                trace.failed(error.reason)
            raise
        ended_s = self._clock()
        self._metrics.decided(decision, ended_s - started_s)
        self._metrics.attempts.chosen(decision.destination, target)
        self._metrics.processing_s.observe(ended_s - asked.started_s)
        self._metrics.request.started(series)
        if trace is not None:
            trace.decided(decision)
        _log_decision(decision, request)
        return self._routing(
            decision, asked, _InFlight(decision.decision_id, started_s, names, series, trace)
        )

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
        assert isinstance(token, _InFlight)
        self._picker.first_token(token.decision_id)

    def finished(self, token: object, outcome: Outcome) -> None:
        assert isinstance(token, _InFlight)
        self._picker.release(token.decision_id, outcome)
        if token.trace is not None:
            token.trace.ended(outcome)
        self._metrics.request.ended(token.series, token.names, outcome, self._clock() - token.decided_at_s)

    def _count(
        self, asked: _Asked, parsed: ParsedRequest, token_ids: Sequence[int] | None
    ) -> tuple[RequestNames, RequestSeries]:
        models = self._picker.models
        is_base = models.is_base(parsed.model)
        if not is_base and not models.any_known:
            self._warn_no_base_model()
        if token_ids is None:
            reason = "no_tokenizer" if self._tokeniser is None else "tokenizer"
            if parsed.prompt is None:
                reason = parsed.no_prompt or "no_prompt"
            self._metrics.untokenised.labels(reason).inc()
        named = parsed.model if asked.rename_model is None else asked.rename_model[1]
        names = RequestNames(named, parsed.model, asked.wishes.fairness_id)
        series = self._metrics.request.asked(names, parsed.size_bytes, is_base=is_base)
        if asked.rename_model is not None:
            label = self._metrics.request.label
            self._metrics.rewrites.labels("header", label(names.model), label(names.target)).inc()
        return names, series

    def _scheduling_request(
        self, head: RequestHead, parsed: ParsedRequest, token_ids: Sequence[int] | None
    ) -> SchedulingRequest:
        models = self._picker.models
        return SchedulingRequest(
            request_id=head.request_id,
            model=parsed.model,
            token_ids=token_ids,
            lora_name=models.lora_name(parsed.model),
            cache_salt=parsed.cache_salt,
            size_bytes=parsed.size_bytes,
            subset=head.subset,
        )

    def _warn_no_base_model(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "no engine has named its base model yet (label model_name of its gauges): requests that name "
                "a model match nothing; if this lasts, set servedModelNames of the token-producer"
            )

    def _routing(self, decision: SchedulingDecision, asked: _Asked, token: _InFlight) -> Routing:
        """Every routing header is either ours or gone, whatever the client sent."""
        destination = ",".join(e.address for e in (decision.destination, *decision.fallbacks))
        headers = {
            sidecar_wire.REQUEST_ID: decision.request_id,
            sidecar_wire.DECISION_ID: decision.decision_id,
        }
        if asked.trace is not None:
            headers[TRACEPARENT] = asked.trace.context.traceparent
        if decision.prefill is not None:
            headers[sidecar_wire.PREFILLER_HOST_PORT] = decision.prefill.address
        if decision.kv_source is not None:
            headers[sidecar_wire.KV_CACHE_SOURCE_HOST_PORT] = decision.kv_source.address
        if self._routing_key is not None:
            claims = RoutingClaims(
                decision.request_id,
                destination,
                headers.get(sidecar_wire.PREFILLER_HOST_PORT, ""),
                headers.get(sidecar_wire.KV_CACHE_SOURCE_HOST_PORT, ""),
            )
            headers[sidecar_wire.ROUTING_AUTH] = sign_routing(
                self._routing_key, claims, now_s=self._unix_clock()
            )
        removed = [name for name in sidecar_wire.ROUTING_HEADERS if name not in headers]
        if asked.rename_model is not None:
            removed.append("accept-encoding")  # a name cannot be put back into a compressed answer
        return Routing(
            destination=destination,
            set_headers=headers,
            remove_headers=removed,
            body=asked.new_body,
            token=token,
            rename_model=asked.rename_model,
        )


def _read(asked: _Asked) -> tuple[ParsedRequest, _Asked]:
    """Parse, and exchange the model's name where that is wished. Blocks. Raises `BadRequest`."""
    parsed = parse_request(asked.body, asked.head.path, asked.headers)
    wanted = asked.wishes.model
    if wanted is None or not parsed.model or wanted == parsed.model or "content-encoding" in asked.headers:
        return parsed, asked
    body = rewrite_model(asked.body, wanted)
    if body is None:
        return parsed, asked
    return replace(parsed, model=wanted), replace(asked, new_body=body, rename_model=(wanted, parsed.model))


def _read_headers(head: RequestHead) -> dict[str, str]:
    return {name: ",".join(head.headers.all(name)) for name in _READ_HEADERS if name in head.headers}


def _log_decision(decision: SchedulingDecision, request: SchedulingRequest) -> None:
    """The one INFO line of a request: ids, addresses and counts."""
    source = decision.choice.source
    log.info(
        "request %s decision %s: %d tokens to %s%s, cached there %d, source %s (%s%s)",
        decision.request_id,
        decision.decision_id,
        request.prompt_tokens,
        decision.destination.id,
        f", prefill on {decision.prefill.id}" if decision.prefill else "",
        decision.computing_cached_tokens,
        source.endpoint.id if source else "none",
        decision.choice.reason.value,
        f", gain {source.gain_tokens}" if source else "",
    )
