"""One listener's request path, straight down: headers -> plan -> body -> legs -> answer.

What needs no rewriting passes through: a body that may be JSON is held (bounded) because a client's
own `kv_transfer_params` has to be removed from it, any other body is streamed. This is the request
boundary: expected faults become one JSON answer here, anything else is logged with its traceback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, assert_never

import orjson
from multidict import CIMultiDict

from sidecar import kv_params, wire
from sidecar.allowlist import AllowList
from sidecar.answer_edit import UsageWatch
from sidecar.endpoint import HostPort
from sidecar.errors import (
    BodyEncoded,
    BodyInvalid,
    BodyTooLarge,
    BodyTooSlow,
    RoutingRefused,
    ShuttingDown,
    SidecarError,
    StreamBroken,
    TargetInvalid,
    json_body,
)
from sidecar.exchange import Exchange, log_name
from sidecar.handoff import OWNED
from sidecar.headers import request_headers
from sidecar.http.body import Body
from sidecar.http.message import BodyOverLimit, HttpFault
from sidecar.http.service import Request
from sidecar.kv_params import Api
from sidecar.legs import SplitLegs
from sidecar.peer_health import PeerHealth
from sidecar.plan import (
    Aggregated,
    Facts,
    ForwardPlan,
    PeerLeg,
    PrefillDecode,
    Refused,
    RoutingRules,
    Self,
    plan_request,
)
from sidecar.prefill import SplitRequest
from sidecar.relay import relay
from sidecar.telemetry import Telemetry
from sidecar.tracing.request import begin_request
from sidecar.tracing.spans import TRACEPARENT, Tracer
from sidecar.trust import Trust
from sidecar.upstream import Call, Upstream

_log = logging.getLogger(__name__)

_HEALTH_PATH: Final = "/health"
_IN_THREAD_BYTES: Final = 64 << 10  # parsing more than this would hold up every other stream


@dataclass(frozen=True, slots=True)
class ProxyRules:
    """What of the configuration decides about one listener."""

    routing: RoutingRules
    own: Self
    serving: HostPort  # this listener, as headers name it
    engine_host: str
    engine_base_port: int  # HTTP port of the engine's rank 0
    routing_key: bytes | None
    max_body_bytes: int
    body_timeout_s: float


class Proxy:
    """Serves the requests of one rank's listener."""

    def __init__(
        self,
        rules: ProxyRules,
        allow_list: AllowList,
        engine: Upstream,
        legs: SplitLegs,
        health: PeerHealth,
        telemetry: Telemetry,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._rules = rules
        self._allow_list = allow_list
        self._trust = Trust(rules.routing_key, rules.serving, allow_list)
        self._engine = engine
        self._legs = legs
        self._health = health
        self._telemetry = telemetry
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def wait_idle(self) -> None:
        """Until no request is being served."""
        await self._idle.wait()

    async def handle(self, request: Request) -> None:
        """The handler of every route."""
        path = request.head.path
        if path == _HEALTH_PATH and request.method in ("GET", "HEAD"):
            status = "draining" if self.draining else "ok"
            _answer_json(request, 503 if self.draining else 200, orjson.dumps({"status": status}))
            return
        exchange = Exchange(request, time.monotonic())
        self._active += 1
        self._idle.clear()
        self._telemetry.request_started()
        if self._tracer is not None:
            exchange.span = begin_request(self._tracer, request.headers.get(TRACEPARENT))
        try:
            await self._guarded(exchange)
        finally:
            if exchange.span is not None:
                exchange.end_span(exchange.span)
            self._active -= 1
            if not self._active:
                self._idle.set()
            self._telemetry.request_ended(exchange.kind, exchange.outcome)
            exchange.log_end(_log)

    async def _guarded(self, exchange: Exchange) -> None:
        """Serve; turn every fault into an answer, or into a broken connection if one has begun."""
        try:
            await self._serve(exchange)
            exchange.outcome = "complete"
        except SidecarError as error:
            exchange.outcome = error.reason
            self._error(exchange.request, error)
        except StreamBroken as error:
            exchange.outcome = "broken"
            _log.warning("request %s: %s", log_name(exchange.request), error)
        except ConnectionError:
            exchange.outcome = "client_gone"
        except asyncio.CancelledError:
            exchange.outcome = "cancelled"
            raise
        except Exception:  # noqa: BLE001 - the request boundary
            _log.exception("request %s: fault of the sidecar", log_name(exchange.request))
            self._error(exchange.request, SidecarError("The sidecar failed"))

    def _error(self, request: Request, error: SidecarError) -> None:
        """Exactly one answer is ever started; one that has begun is broken off by its connection."""
        if request.answer.status is None:
            request.answer.keep_alive &= not isinstance(error, ShuttingDown | BodyTooSlow)
            _answer_json(request, error.status, json_body(error), retry=isinstance(error, ShuttingDown))

    async def _serve(self, exchange: Exchange) -> None:
        if self.draining:
            raise ShuttingDown("This endpoint is shutting down: try another one")
        request = exchange.request
        target = _target(request)
        api = kv_params.api_of(request.method, request.head.path)
        plan = self._plan(request, api)
        self._count(plan)
        exchange.kind = type(plan).__name__
        match plan:
            case Refused():
                raise RoutingRefused(plan.message)
            case PeerLeg():
                await self._single(exchange, plan.rank, target, _streamed(request), keep_length=True)
            case Aggregated():
                await self._aggregated(exchange, plan, api, target)
            case PrefillDecode():
                assert api is not None, "only generating routes are split"
                await self._split(exchange, plan, api, target)
            case _:
                assert_never(plan)

    # --- plan ----------------------------------------------------------------------------------

    def _plan(self, request: Request, api: Api | None) -> ForwardPlan:
        facts = Facts(
            self._trust.auth(request), generates=api is not None, from_peer=self._trust.from_peer(request)
        )
        return plan_request(
            request.headers,
            facts,
            self._rules.own,
            self._rules.routing,
            self._allow_list,
            kv_params.request_id_or_fresh,
        )

    def _count(self, plan: ForwardPlan) -> None:
        for dropped in plan.dropped:
            self._telemetry.header_dropped(dropped)
            if dropped.header == wire.KV_CACHE_SOURCE_HOST_PORT:
                self._telemetry.pull_skipped(dropped.reason)

    # --- one leg or two ------------------------------------------------------------------------

    async def _aggregated(self, exchange: Exchange, plan: Aggregated, api: Api | None, target: str) -> None:
        request = exchange.request
        if not request.has_body or not _may_be_json(request, api):
            await self._single(exchange, plan.rank, target, _streamed(request), keep_length=True)
            return
        body = await self._body(request)
        source = plan.source
        if source is None or api is None or not self._health.allows_pull(source):
            await self._single(exchange, plan.rank, target, body)
            return
        params = kv_params.pull_params(plan.kv_request_id, source.serving.host, source.p2p_port)
        rewritten = kv_params.with_params(body, params)
        if rewritten is None:
            self._telemetry.pull_skipped("body_not_object")
            await self._single(exchange, plan.rank, target, body)
            return
        self._telemetry.pull_requested("aggregated")
        exchange.kv_request_id = plan.kv_request_id
        watch = UsageWatch(api)
        await self._single(exchange, plan.rank, target, rewritten, watch=watch)
        self._health.pull_ended("aggregated", source, watch.usage)

    async def _split(self, exchange: Exchange, plan: PrefillDecode, api: Api, target: str) -> None:
        raw = await self._body(exchange.request)
        body = kv_params.parse_object(raw)
        reason = "body_not_object" if body is None else kv_params.unsplittable(api, body)
        if body is None or reason is not None:
            self._telemetry.fell_back(reason or "")
            await self._single(exchange, plan.rank, target, raw)
            return
        exchange.kv_request_id = plan.kv_request_id
        headers = request_headers(exchange.request.headers, without=("content-length",))
        engine = self._engine_address(plan.rank)
        await self._legs.run(
            SplitRequest(plan, api, engine, target, headers, raw, body), exchange.request.answer
        )

    async def _single(
        self,
        exchange: Exchange,
        rank: int,
        target: str,
        body: bytes | Body | None,
        *,
        keep_length: bool = False,
        watch: UsageWatch | None = None,
    ) -> None:
        """One leg to the own engine, answer passed through."""
        request = exchange.request
        headers = request_headers(request.headers, without=() if keep_length else ("content-length",))
        call = Call("engine", self._engine_address(rank), request.method, target, headers, body)
        async with self._engine.answer(call) as answer:
            await relay(answer, request.answer, watch)

    def _engine_address(self, rank: int) -> HostPort:
        return HostPort(self._rules.engine_host, self._rules.engine_base_port + rank)

    async def _body(self, request: Request) -> bytes:
        """The client's whole body, without kv_transfer_params of its own.

        Raises:
            SidecarError: too large, too slow, compressed, or suspicious and not JSON.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BodyEncoded("A compressed request body cannot be routed: send it uncompressed")
        raw = await self._read(request)
        owned = OWNED[self._rules.routing.connector]
        if len(raw) > _IN_THREAD_BYTES and kv_params.is_suspicious(raw, owned):
            cleaned = await asyncio.to_thread(kv_params.without_client_params, raw, owned)
        else:
            cleaned = kv_params.without_client_params(raw, owned)
        if cleaned is not raw:
            self._telemetry.client_params_removed()
        return cleaned

    async def _read(self, request: Request) -> bytes:
        limit_bytes = self._rules.max_body_bytes
        try:
            if (request.head.content_length or 0) > limit_bytes:
                raise BodyOverLimit
            if request.body.ended:
                return await request.body.whole(limit_bytes)
            async with asyncio.timeout(self._rules.body_timeout_s):
                return await request.body.whole(limit_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"No whole body in {self._rules.body_timeout_s:g} s") from error
        except BodyOverLimit as fault:
            raise BodyTooLarge(f"The request body is larger than {limit_bytes} bytes") from fault
        except HttpFault as fault:
            raise BodyInvalid("The request body's framing is broken") from fault


def _answer_json(request: Request, status: int, body: bytes, *, retry: bool = False) -> None:
    headers = CIMultiDict({"Content-Type": "application/json; charset=utf-8"})
    if retry:
        headers["Retry-After"] = "1"
    request.answer.whole(status, HTTPStatus(status).phrase, headers, body)


def _streamed(request: Request) -> Body | None:
    return request.body if request.has_body else None


def _target(request: Request) -> str:
    """Path and query as the client wrote them; of an absolute-form target the path alone."""
    target = request.head.path_and_query
    if not target.startswith("/") or not target.isascii():
        raise TargetInvalid("The request target is not a path in ASCII")
    return target


def _may_be_json(request: Request, api: Api | None) -> bool:
    """Whether an engine could read the body as JSON: anything not declared to be something else."""
    declared = request.headers.get("Content-Type")
    if api is not None or declared is None:
        return True
    return "json" in declared.partition(";")[0].lower()
