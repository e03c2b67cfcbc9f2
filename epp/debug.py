"""Metrics and debug port: /metrics open, /debug/kvpull/* behind a bearer token. JSON of numbers, ids and
addresses; never a prompt, token id, salt or header value.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from epp.core.decision_record import DecisionRecord
from epp.core.endpoint_picker import EndpointPicker, EndpointSnapshot
from epp.core.types import Endpoint, ScoredCandidate
from epp.thresholds.directory_source import ThresholdState

Json = dict[str, Any]


def build_debug_app(
    picker: EndpointPicker,
    registry: CollectorRegistry,
    threshold_state: Callable[[], ThresholdState],
    token: str | None,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """The aiohttp application. Without a token the debug routes do not exist."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def decision(request: web.Request) -> web.Response:
        record = picker.find_decision(request.match_info["id"])
        if record is None:
            raise web.HTTPNotFound(text="no such decision (any more)")
        return web.json_response(decision_json(record))

    async def endpoints(_request: web.Request) -> web.Response:
        now_s = clock()
        sizes, names = picker.cache.differing_block_sizes(), _hash_disagreements(picker)
        rows = [
            _endpoint_json(picker, row, now_s)
            | {
                "differs_from_pool": row.candidate.endpoint.id in sizes,
                "hashes_unlike": names.get(str(row.candidate.endpoint.id)),
            }
            for row in picker.snapshot(now_s)
        ]
        return web.json_response(rows)

    async def thresholds(_request: web.Request) -> web.Response:
        return web.json_response(_threshold_json(picker, threshold_state()))

    app = web.Application(middlewares=[_authorised(token)])
    app.router.add_get("/metrics", metrics)
    if token is not None:
        app.router.add_get("/debug/kvpull/decisions/{id}", decision)
        app.router.add_get("/debug/kvpull/endpoints", endpoints)
        app.router.add_get("/debug/kvpull/thresholds", thresholds)
    return app


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


def decision_json(record: DecisionRecord) -> Json:
    """One decision record for people and tools."""
    decision, choice = record.decision, record.decision.choice
    source = choice.source
    return {
        "decision_id": decision.decision_id,
        "request_id": decision.request_id,
        "destination": _address(decision.destination),
        "fallbacks": [_address(e) for e in decision.fallbacks],
        "prefill": _address(decision.prefill) if decision.prefill else None,
        "source": _address(source.endpoint)
        | {"servable_tokens": source.servable_tokens, "gain_tokens": source.gain_tokens}
        if source
        else None,
        "reason": choice.reason.value,
        "band": [[e.pod, tokens, weight] for e, tokens, weight in choice.considered],
        "computing": str(decision.computing),
        "computing_cached_tokens": decision.computing_cached_tokens,
        "min_cached_token_delta": choice.min_cached_token_delta,
        "candidates": [_candidate_json(s) for s in decision.scored],
        "outcome": _outcome_json(record),
    }


def _address(endpoint: Endpoint) -> Json:
    return {"pod": endpoint.id.pod, "rank": endpoint.id.rank, "address": endpoint.address}


def _candidate_json(scored: ScoredCandidate) -> Json:
    row = scored.candidate
    return _address(row.endpoint) | {
        "cached_tokens": row.match.cached_tokens,
        "servable_tokens": row.match.servable_tokens,
        "state": row.match.state.value,
        "waiting": row.metrics.waiting_requests,
        "inflight": row.load.requests,
        "score": round(scored.score, 6),
        "parts": {name: round(value, 6) for name, value in scored.parts},
    }


def _outcome_json(record: DecisionRecord) -> Json | None:
    outcome = record.outcome
    if outcome is None:
        return None
    return {
        "status": outcome.status,
        "served_by": outcome.served_by,
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "cached_tokens": outcome.cached_tokens,
        "ttft_s": outcome.ttft_s,
        "completed": outcome.completed,
    }


def _endpoint_json(picker: EndpointPicker, row: EndpointSnapshot, now_s: float) -> Json:
    candidate, metrics = row.candidate, row.candidate.metrics
    stats = picker.cache.stats(candidate.endpoint.id)
    scraped = metrics.scraped_at_s
    return _address(candidate.endpoint) | {
        "labels": dict(candidate.endpoint.labels),
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
    policy = picker.source_policy
    return {
        "generation": state.generation,
        "rejected": state.rejected,
        "configured": policy.configured,
        "enabled": policy.enabled,
        "active": policy.active,
        "minCachedTokenDelta": policy.min_cached_token_delta,
        "requireVerified": policy.require_verified,
    }
