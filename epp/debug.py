"""Metrics and debug port: /metrics open, /debug/kvpull/* behind a bearer token. JSON of numbers, ids and
addresses; never a prompt, token id, salt or header value. What `kvpull doctor` posts to `tokens` is answered
with the number of tokens and a digest of them, so that it can compare the picker's tokens with an engine's.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker, EndpointSnapshot
from epp.core.errors import PickerError
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.thresholds import SETTING_NAMES, PullSettings
from epp.telemetry.decision_json import Json, address_json, decision_json
from epp.thresholds.document import SETTING_PATHS
from epp.thresholds.in_force import ThresholdState

MAX_PROBE_BYTES = 256 << 10  # of a request whose tokens are asked for

TokenIds = Callable[[str, bytes], Awaitable[Sequence[int] | None]]
Handler = Callable[[web.Request], Awaitable[web.Response]]


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 over the ids, four bytes little-endian each."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in token_ids)).hexdigest()


def build_debug_app(
    picker: EndpointPicker,
    registry: CollectorRegistry,
    threshold_state: Callable[[], ThresholdState],
    token: str | None,
    clock: Callable[[], float] = time.monotonic,
    *,
    token_ids: TokenIds | None = None,
    ports: Callable[[EndpointId], Json] = lambda _: {},
    config: Callable[[], Json] | None = None,
) -> web.Application:
    """The aiohttp application. Without a token the debug routes do not exist.

    `token_ids` tokenises a body sent to a path, as a request would be; `ports` says where this picker
    looks for an endpoint's events; `config` is the configuration in force.
    """
    app = web.Application(middlewares=[_authorised(token)], client_max_size=MAX_PROBE_BYTES)
    app.router.add_get("/metrics", _metrics_of(registry))
    if token is None:
        return app
    pool = _PoolRoutes(picker, clock, ports)
    app.router.add_get("/debug/kvpull/decisions/{id}", pool.decision)
    app.router.add_get("/debug/kvpull/endpoints", pool.endpoints)
    app.router.add_get(
        "/debug/kvpull/thresholds", _answering(lambda: _threshold_json(picker, threshold_state()))
    )
    if config is not None:
        app.router.add_get("/debug/kvpull/config", _answering(config))
    if token_ids is not None:
        app.router.add_post("/debug/kvpull/tokens", _tokens_by(token_ids))
    return app


def _metrics_of(registry: CollectorRegistry) -> Handler:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


class _PoolRoutes:
    """Decisions and endpoints, as the picker knows them when it is asked."""

    def __init__(
        self, picker: EndpointPicker, clock: Callable[[], float], ports: Callable[[EndpointId], Json]
    ) -> None:
        self._picker = picker
        self._clock = clock
        self._ports = ports

    async def decision(self, request: web.Request) -> web.Response:
        record = self._picker.find_decision(request.match_info["id"])
        if record is None:
            raise web.HTTPNotFound(text="no such decision (any more)")
        return web.json_response(decision_json(record))

    async def endpoints(self, _request: web.Request) -> web.Response:
        picker, now_s = self._picker, self._clock()
        sizes, names = picker.cache.differing_block_sizes(), _hash_disagreements(picker)
        rows = [
            _endpoint_json(picker, row, now_s)
            | self._ports(row.candidate.endpoint.id)
            | {
                "differs_from_pool": row.candidate.endpoint.id in sizes,
                "hashes_unlike": names.get(str(row.candidate.endpoint.id)),
            }
            for row in picker.snapshot(now_s)
        ]
        return web.json_response(rows)


def _tokens_by(token_ids: TokenIds) -> Handler:
    async def tokens(request: web.Request) -> web.Response:
        try:
            found = await token_ids(request.query.get("path", ""), await request.read())
        except PickerError as error:
            raise web.HTTPBadRequest(text=error.reason) from error
        answer: Json = {"count": None, "sha256": None}
        if found is not None:
            answer = {"count": len(found), "sha256": token_digest(found)}
        return web.json_response(answer)

    return tokens


def _answering(read: Callable[[], Json]) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(read())

    return answer


def _authorised(token: str | None) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/debug/"):
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if token is None or not hmac.compare_digest(given, expected):
                raise web.HTTPUnauthorized(text="bearer token missing or wrong")
        response: web.StreamResponse = await handler(request)
        return response

    return check


def _endpoint_json(picker: EndpointPicker, row: EndpointSnapshot, now_s: float) -> Json:
    candidate, metrics = row.candidate, row.candidate.metrics
    stats = picker.cache.stats(candidate.endpoint.id)
    scraped = metrics.scraped_at_s
    return address_json(candidate.endpoint) | {
        "labels": dict(candidate.endpoint.labels),
        "p2p_address": candidate.endpoint.p2p_address,
        "draining": candidate.endpoint.draining,
        "state": stats.state.value,
        "blocks_device": stats.index.device_blocks,
        "blocks_cpu": stats.index.cpu_blocks,
        "blocks_window_groups": stats.index.window_blocks,
        "block_size_tokens": stats.index.block_size_tokens,
        "unsupported": stats.index.unsupported,
        "events": asdict(stats.counters),
        "metrics_age_s": None if scraped is None else round(now_s - scraped, 3),
        "waiting": metrics.waiting_requests,
        "running": metrics.running_requests,
        "kv_usage": metrics.kv_usage,
        "inflight": candidate.load.requests,
        "pulls_served": candidate.load.pulls_served,
        "verified": metrics.info is not None,
        "info": _info_json(candidate.metrics.info),
        "incompatible_with": dict(row.incompatible_with),
        "refused_peers": sorted(picker.sources.refusals.refused_by(candidate.endpoint.id, now_s)),
    }


def _hash_disagreements(picker: EndpointPicker) -> dict[str, str]:
    """Endpoint -> one of the larger side whose engine names equal content differently."""
    return {str(found.endpoint): str(found.other) for found in picker.cache.hash_disagreements()}


def _info_json(info: Any) -> Json | None:
    if info is None:
        return None
    return {
        "instance": info.instance,
        "block_size": info.block_size_tokens,
        "hash_algo": info.hash_algo,
        "seed_fp": info.seed_fp,
        "model_fp": info.model_fp,
        "layout_fp": info.layout_fp,
        "protocol": info.protocol,
        "p2p_addr": info.p2p_addr,
    }


def _threshold_json(picker: EndpointPicker, state: ThresholdState) -> Json:
    policy = picker.sources.policy()
    return {
        "source": state.source,
        "documents": list(state.documents),
        "generation": state.generation,
        "rejected": state.rejected,
        "warnings": list(state.warnings),
        "configured": policy.configured,
        "enabled": policy.enabled,
        "active": policy.active,
        "minCachedTokenDelta": policy.min_cached_token_delta,
        "requireVerified": policy.require_verified,
        "inflightAwareness": policy.inflight_awareness,
        "maxInflightPulls": policy.max_inflight_pulls,
        "mode": policy.mode,
        "costMarginMs": policy.cost_margin_ms,
        "rules": [
            scope._asdict() | _settings_json(settings) for scope, settings in state.thresholds.rules.items()
        ],
    }


def _settings_json(settings: PullSettings) -> Json:
    """What a rule sets, under the names that documents use."""
    values = ((SETTING_PATHS[name], getattr(settings, name)) for name in SETTING_NAMES)
    return {"set": {path: _plain(value) for path, value in values if value is not None}}


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, RecomputeCurve | PullCurve) else value
