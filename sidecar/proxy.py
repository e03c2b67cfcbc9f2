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
from typing import Final, assert_never

from aiohttp import StreamReader, web

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
)
from sidecar.exchange import Exchange, log_name
from sidecar.handoff import OWNED
from sidecar.headers import request_headers
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
from sidecar.relay import ClientStream
from sidecar.telemetry import Telemetry
from sidecar.tracing.request import begin_request
from sidecar.tracing.spans import TRACEPARENT, Tracer
from sidecar.trust import Trust
from sidecar.upstream import Call, Upstream

_log = logging.getLogger(__name__)

_HEALTH_PATH: Final = "/health"
_IN_THREAD_BYTES: Final = 64 << 10  # parsing more than this would hold up every other stream
_MANY_PIECES: Final = 256  # a list of them costs more than their bytes


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
    idle_timeout_s: float


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

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The handler of every route."""
        if request.path == _HEALTH_PATH and request.method in ("GET", "HEAD"):
            status = "draining" if self.draining else "ok"
            return web.json_response({"status": status}, status=503 if self.draining else 200)
        client = ClientStream(request, idle_timeout_s=self._rules.idle_timeout_s)
        exchange = Exchange(request, client, time.monotonic())
        self._active += 1
        self._idle.clear()
        self._telemetry.request_started()
        if self._tracer is not None:
            exchange.span = begin_request(self._tracer, request.headers.get(TRACEPARENT))
        try:
            return await self._guarded(exchange)
        finally:
            if exchange.span is not None:
                exchange.end_span(exchange.span)
            self._active -= 1
            if not self._active:
                self._idle.set()
            self._telemetry.request_ended(exchange.kind, exchange.outcome)
            exchange.log_end(_log)

    async def _guarded(self, exchange: Exchange) -> web.StreamResponse:
        """Serve; turn every fault into an answer, or into a broken connection if one has begun."""
        try:
            await self._serve(exchange)
            exchange.outcome = "complete"
        except SidecarError as error:
            exchange.outcome = error.reason
            return self._error(exchange, error)
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
            return self._error(exchange, SidecarError("The sidecar failed"))
        response = exchange.client.response
        return response if response is not None else web.Response(status=499)

    def _error(self, exchange: Exchange, error: SidecarError) -> web.StreamResponse:
        """Exactly one answer is ever started."""
        started = exchange.client.response
        if started is not None:
            exchange.client.break_off()
            return started
        response = web.json_response(error.body(), status=error.status)
        if isinstance(error, ShuttingDown):
            response.headers["Retry-After"] = "1"
            response.force_close()
        return response

    async def _serve(self, exchange: Exchange) -> None:
        if self.draining:
            raise ShuttingDown("This endpoint is shutting down: try another one")
        request = exchange.request
        target = _target(request)
        api = kv_params.api_of(request.method, request.path)
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

    def _plan(self, request: web.Request, api: Api | None) -> ForwardPlan:
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
        if not request.body_exists or not _may_be_json(request, api):
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
        await self._legs.run(SplitRequest(plan, api, engine, target, headers, raw, body), exchange.client)

    async def _single(
        self,
        exchange: Exchange,
        rank: int,
        target: str,
        body: bytes | StreamReader | None,
        *,
        keep_length: bool = False,
        watch: UsageWatch | None = None,
    ) -> None:
        """One leg to the own engine, answer passed through."""
        request = exchange.request
        headers = request_headers(request.headers, without=() if keep_length else ("content-length",))
        call = Call("engine", self._engine_address(rank), request.method, target, headers, body)
        async with self._engine.answer(call) as answer:
            await exchange.client.relay(answer, edit=watch)

    def _engine_address(self, rank: int) -> HostPort:
        return HostPort(self._rules.engine_host, self._rules.engine_base_port + rank)

    async def _body(self, request: web.Request) -> bytes:
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

    async def _read(self, request: web.Request) -> bytes:
        limit_bytes = self._rules.max_body_bytes
        too_large = BodyTooLarge(f"The request body is larger than {limit_bytes} bytes")
        if (request.content_length or 0) > limit_bytes:
            raise too_large
        whole, pieces, size_bytes = bytearray(), list[bytes](), 0
        try:
            async with asyncio.timeout(self._rules.body_timeout_s):
                async for piece in request.content.iter_any():
                    pieces.append(piece)
                    size_bytes += len(piece)
                    if size_bytes > limit_bytes:
                        raise too_large
                    if len(pieces) >= _MANY_PIECES:
                        whole += b"".join(pieces)
                        pieces.clear()
        except TimeoutError as error:
            raise BodyTooSlow(f"No whole body in {self._rules.body_timeout_s:g} s") from error
        except web.RequestPayloadError as error:
            raise BodyInvalid("The request body's framing is broken") from error
        return b"".join((whole, *pieces)) if whole or len(pieces) != 1 else pieces[0]


def _streamed(request: web.Request) -> StreamReader | None:
    return request.content if request.body_exists else None


def _target(request: web.Request) -> str:
    """Path and query as the client wrote them; of an absolute-form target the path alone."""
    raw = request.raw_path
    target = raw if raw.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/") or not target.isascii():
        raise TargetInvalid("The request target is not a path in ASCII")
    return target


def _may_be_json(request: web.Request, api: Api | None) -> bool:
    """Whether an engine could read the body as JSON: anything not declared to be something else."""
    declared = "Content-Type" in request.headers
    return api is not None or not declared or "json" in request.content_type
