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
from dataclasses import dataclass

from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import PickerError
from epp.core.types import Outcome, SchedulingDecision, SchedulingRequest
from epp.extproc.events import RequestHead, Routing
from epp.request.parse import ParsedRequest, blocks_for_long, parse_request
from epp.request.tokenise import Tokeniser
from epp.telemetry.metrics import PickerMetrics
from sidecar import wire as sidecar_wire
from sidecar.routing_auth import RoutingClaims, sign_routing

log = logging.getLogger(__name__)

_READ_HEADERS = ("content-type", "content-encoding")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What `first_token` and `finished` need to know of a decision."""

    decision_id: str
    decided_at_s: float


class Director:
    """The `RequestHandler` of the ext-proc service."""

    def __init__(
        self,
        picker: EndpointPicker,
        tokeniser: Tokeniser | None,
        metrics: PickerMetrics,
        *,
        routing_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`tokeniser` None: every request is routed by load and has no source."""
        self._picker = picker
        self._tokeniser = tokeniser
        self._metrics = metrics
        self._routing_key = routing_key
        self._clock = clock
        self._unix_clock = unix_clock
        self._warned = False

    def decide(self, head: RequestHead, body: bytes | None) -> Routing | Awaitable[Routing]:
        """Route one request: at once, unless a long body has to be read or tokenised in a thread.

        Raises:
            PickerError: with the status and reason the client is to see.
        """
        self._metrics.requests.inc()
        try:
            headers = _read_headers(head)
            if blocks_for_long(body or b"", headers):
                return self._decide_long(head, body or b"", headers)
            parsed = parse_request(body or b"", head.path, headers)
            prompt = parsed.prompt
            if prompt is None or self._tokeniser is None:
                return self._route(head, parsed, None)
            plain = "content-encoding" not in headers  # else a few bytes may be a long text
            if plain and self._tokeniser.answers_at_once(prompt, parsed.size_bytes):
                return self._route(head, parsed, self._tokeniser.token_ids_at_once(prompt))
            return self._decide_tokens(head, parsed)
        except PickerError as error:
            self._metrics.errors.labels(error.reason).inc()
            raise

    async def _decide_long(self, head: RequestHead, body: bytes, headers: Mapping[str, str]) -> Routing:
        try:
            parsed = await asyncio.to_thread(parse_request, body, head.path, headers)
        except PickerError as error:
            self._metrics.errors.labels(error.reason).inc()
            raise
        return await self._decide_tokens(head, parsed)

    async def _decide_tokens(self, head: RequestHead, parsed: ParsedRequest) -> Routing:
        token_ids = None
        if parsed.prompt is not None and self._tokeniser is not None:
            token_ids = await self._tokeniser.token_ids(parsed.prompt)
        try:
            return self._route(head, parsed, token_ids)
        except PickerError as error:
            self._metrics.errors.labels(error.reason).inc()
            raise

    def _route(self, head: RequestHead, parsed: ParsedRequest, token_ids: Sequence[int] | None) -> Routing:
        """Schedule and book in one breath."""
        request = self._scheduling_request(head, parsed, token_ids)
        started_s = self._clock()
        decision = self._picker.schedule(request, started_s, str(uuid.uuid4()))
        self._metrics.decided(decision, self._clock() - started_s)
        _log_decision(decision, request)
        return self._routing(decision, started_s)

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
        self._metrics.ttft_s.observe(self._clock() - token.decided_at_s)

    def finished(self, token: object, outcome: Outcome) -> None:
        assert isinstance(token, _InFlight)
        self._picker.release(token.decision_id, outcome)
        duration_s = self._clock() - token.decided_at_s
        self._metrics.duration_s.observe(duration_s)
        self._metrics.request.ended(outcome, duration_s)

    def _scheduling_request(
        self, head: RequestHead, parsed: ParsedRequest, token_ids: Sequence[int] | None
    ) -> SchedulingRequest:
        models = self._picker.models
        is_base = models.is_base(parsed.model)
        if not is_base and not models.any_known:
            self._warn_no_base_model()
        self._metrics.request.asked(parsed.model, parsed.size_bytes, is_base=is_base)
        if token_ids is None:
            reason = "no_tokenizer" if self._tokeniser is None else "tokenizer"
            if parsed.prompt is None:
                reason = parsed.no_prompt or "no_prompt"
            self._metrics.untokenised.labels(reason).inc()
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

    def _routing(self, decision: SchedulingDecision, decided_at_s: float) -> Routing:
        """Every routing header is either ours or gone, whatever the client sent."""
        destination = ",".join(e.address for e in (decision.destination, *decision.fallbacks))
        headers = {
            sidecar_wire.REQUEST_ID: decision.request_id,
            sidecar_wire.DECISION_ID: decision.decision_id,
        }
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
        return Routing(
            destination=destination,
            set_headers=headers,
            remove_headers=[name for name in sidecar_wire.ROUTING_HEADERS if name not in headers],
            token=_InFlight(decision.decision_id, decided_at_s),
        )


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
