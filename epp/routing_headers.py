"""A decision as the headers that gateway and sidecar follow. Every one of them is either ours or gone."""

from __future__ import annotations

from dataclasses import replace

from epp.core.types import SchedulingDecision
from sidecar import wire as sidecar_wire
from sidecar.routing_auth import RoutingClaims, sign_routing


def destination_of(decision: SchedulingDecision) -> str:
    """`ip:port[,ip:port]`, the best first: pods by their primary port where there is one, once each."""
    endpoints = (decision.destination, *decision.fallbacks)
    if decision.primary_port is not None:
        endpoints = tuple(replace(endpoint, port=decision.primary_port) for endpoint in endpoints)
    return ",".join(dict.fromkeys(endpoint.address for endpoint in endpoints))


def routing_headers(decision: SchedulingDecision, key: bytes | None, unix_s: float) -> dict[str, str]:
    """With a signature where there is a key."""
    headers = {
        sidecar_wire.REQUEST_ID: decision.request_id,
        sidecar_wire.DECISION_ID: decision.decision_id,
    }
    if decision.prefill is not None:
        headers[sidecar_wire.PREFILLER_HOST_PORT] = decision.prefill.address
    if decision.primary_port is not None:
        headers[sidecar_wire.DATA_PARALLEL_HOST_PORT] = decision.destination.address
    if decision.kv_source is not None:
        headers[sidecar_wire.KV_CACHE_SOURCE_HOST_PORT] = decision.kv_source.address
    if key is not None:
        claims = RoutingClaims(
            decision.request_id,
            destination_of(decision),
            headers.get(sidecar_wire.PREFILLER_HOST_PORT, ""),
            headers.get(sidecar_wire.KV_CACHE_SOURCE_HOST_PORT, ""),
        )
        headers[sidecar_wire.ROUTING_AUTH] = sign_routing(key, claims, now_s=unix_s)
    return headers


def absent_headers(headers: dict[str, str]) -> list[str]:
    """Routing headers that must go, whatever the client sent."""
    return [name for name in sidecar_wire.ROUTING_HEADERS if name not in headers]
