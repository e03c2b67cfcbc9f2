"""Typed views of the fleet's HTTP surfaces: an engine, the picker's debug pages, Prometheus text.

A handle only asks and parses. Every call has a deadline; an answer that is not what the surface
promises is a `SurfaceError` that names the address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.errors import FleetError
from deploy.local.ports import EngineAddress
from engine_plugin import wire as engine_wire

_LIVE = "live"
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
_COUNTED = (
    engine_wire.PULL_RECEIVED_BYTES_TOTAL,
    engine_wire.PULL_SERVED_BYTES_TOTAL,
    _WAITING,
    _RUNNING,
)
_DROPPED_TOTAL = "kvpull_sidecar_routing_headers_dropped_total"
_PICKER_REFUSED_TOTAL = "kvpull_epp_peer_refused_total"
_CALL_TIMEOUT = aiohttp.ClientTimeout(total=10)


class SurfaceError(FleetError):
    """A part of the fleet did not answer, or not in the form it promises."""


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """What an engine says happened to one request, in tokens and bytes."""

    prompt_tokens: int
    computed_tokens: int
    device_hit_tokens: int
    restored_tokens: int
    pulled_tokens: int
    pulled_bytes: int
    handed_over_tokens: int
    handed_over_bytes: int
    cached_tokens: int  # all prompt tokens that were not computed
    corrupt_blocks: int
    pull_reason: str | None
    pull_detail: str
    kv_request_id: str | None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RequestAccount:
        return cls(**{f.name: body[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """An engine's transfer counters at one moment."""

    received_bytes: int
    served_bytes: int
    waiting: int
    running: int
    refused: Mapping[tuple[str, str], int]  # (peer, reason)

    @classmethod
    def from_page(cls, text: str) -> EngineCounters:
        """From Prometheus text; a counter with a label per peer is summed.

        Raises:
            SurfaceError: the page is not Prometheus text.
        """
        totals: Counter[str] = Counter()
        refused: dict[tuple[str, str], int] = {}
        try:
            for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
                if sample.name in _COUNTED:
                    totals[sample.name] += int(sample.value)
                if sample.name == engine_wire.PEER_REFUSED_TOTAL:
                    refused[(sample.labels["peer"], sample.labels["reason"])] = int(sample.value)
        except (ValueError, KeyError) as error:
            raise SurfaceError(f"an engine's /metrics page cannot be read: {error}") from error
        return cls(
            received_bytes=totals[engine_wire.PULL_RECEIVED_BYTES_TOTAL],
            served_bytes=totals[engine_wire.PULL_SERVED_BYTES_TOTAL],
            waiting=totals[_WAITING],
            running=totals[_RUNNING],
            refused=refused,
        )


class EngineHandle:
    """One engine, asked directly on its own port."""

    def __init__(self, address: EngineAddress, session: aiohttp.ClientSession) -> None:
        self.address = address
        self._session = session
        self._base = f"http://{address.host}:{address.engine_port}"

    @property
    def pod(self) -> str:
        return self.address.pod

    @property
    def url(self) -> str:
        return self._base

    async def account(self, request_id: str) -> RequestAccount | None:
        """What happened to a request, or None if this engine never saw it."""
        body = await _json(self._session, "GET", f"{self._base}/debug/requests/{request_id}", none_on=404)
        return None if body is None else RequestAccount.from_json(body)

    async def counters(self) -> EngineCounters:
        text = await _text(self._session, f"{self._base}/metrics")
        return EngineCounters.from_page(text)

    async def faults(self, **changes: Any) -> None:
        """Change fault injection (`POST /faults`)."""
        await _json(self._session, "POST", f"{self._base}/faults", body=changes)

    async def fault_state(self) -> dict[str, Any]:
        body = await _json(self._session, "GET", f"{self._base}/faults")
        return body or {}

    async def reset_cache(self, *, cpu_tier_too: bool) -> None:
        suffix = "?reset_external=true" if cpu_tier_too else ""
        await _json(self._session, "POST", f"{self._base}/reset_prefix_cache{suffix}")


class SidecarHandle:
    """One sidecar's metrics port."""

    def __init__(self, address: EngineAddress, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{address.host}:{address.sidecar_metrics_port}/metrics"
        self._session = session

    async def routing_headers_dropped(self) -> int:
        """Routing headers that arrived and were not followed."""
        page = await _text(self._session, self._url)
        families = text_string_to_metric_families(page)
        return int(sum(s.value for family in families for s in family.samples if s.name == _DROPPED_TOTAL))


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision as the picker recorded it."""

    decision_id: str
    destination: str
    prefill: str | None
    source: str | None
    servable_tokens: int
    gain_tokens: int
    reason: str
    computing_cached_tokens: int
    band: tuple[tuple[str, int, float], ...]  # (pod, servable tokens, weight)
    candidates: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One endpoint as the picker sees it now."""

    pod: str
    state: str
    blocks_device: int
    blocks_cpu: int
    waiting: float | None  # None: unknown
    inflight: int  # requests this picker has sent there and not seen the end of
    incompatible_with: Mapping[str, str]  # other endpoint -> first differing field

    @property
    def known(self) -> bool:
        """Cache state exact, load scraped."""
        return self.state == _LIVE and self.waiting is not None


class PickerHandle:
    """The picker's debug pages on its metrics port."""

    def __init__(self, base: str, token: str, session: aiohttp.ClientSession) -> None:
        self._base = base
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"}

    async def decision(self, request_id: str) -> Decision | None:
        url = f"{self._base}/debug/kvpull/decisions/{request_id}"
        body = await _json(self._session, "GET", url, headers=self._headers, none_on=404)
        return None if body is None else _decision(body)

    async def endpoints(self) -> dict[str, EndpointView]:
        url = f"{self._base}/debug/kvpull/endpoints"
        body = await _json(self._session, "GET", url, headers=self._headers)
        return {row["pod"]: _endpoint(row) for row in body}

    async def refusals(self) -> dict[str, set[str]]:
        """By the picker's metrics: endpoint -> reasons for which it refused a peer or was refused."""
        found: dict[str, set[str]] = {}
        page = await _text(self._session, f"{self._base}/metrics")
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == _PICKER_REFUSED_TOTAL and sample.value > 0:
                    found.setdefault(sample.labels["endpoint"], set()).add(sample.labels["reason"])
        return found

    async def thresholds(self) -> dict[str, Any]:
        url = f"{self._base}/debug/kvpull/thresholds"
        return await _json(self._session, "GET", url, headers=self._headers) or {}


def _decision(body: Mapping[str, Any]) -> Decision:
    source = body.get("source")
    prefill = body.get("prefill")
    return Decision(
        decision_id=body["decision_id"],
        destination=body["destination"]["pod"],
        prefill=prefill["pod"] if prefill else None,
        source=source["pod"] if source else None,
        servable_tokens=int(source["servable_tokens"]) if source else 0,
        gain_tokens=int(source["gain_tokens"]) if source else 0,
        reason=body["reason"],
        computing_cached_tokens=int(body["computing_cached_tokens"]),
        band=tuple((pod, int(tokens), float(weight)) for pod, tokens, weight in body["band"]),
        candidates=tuple(body["candidates"]),
    )


def _endpoint(row: Mapping[str, Any]) -> EndpointView:
    return EndpointView(
        pod=row["pod"],
        state=row["state"],
        blocks_device=int(row["blocks_device"]),
        blocks_cpu=int(row["blocks_cpu"]),
        waiting=row["waiting"],
        inflight=int(row["inflight"]),
        incompatible_with=row["incompatible_with"],
    )


async def _json(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    none_on: int | None = None,
) -> Any:
    try:
        async with session.request(method, url, json=body, headers=headers, timeout=_CALL_TIMEOUT) as answer:
            if answer.status == none_on:
                return None
            if answer.status >= 400:
                raise SurfaceError(f"{method} {url} answered {answer.status}: {await answer.text()}")
            if answer.content_type != "application/json":
                return None
            return await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise SurfaceError(f"{method} {url} failed: {str(error) or type(error).__name__}") from error


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url, timeout=_CALL_TIMEOUT) as answer:
            if answer.status != 200:
                raise SurfaceError(f"GET {url} answered {answer.status}")
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SurfaceError(f"GET {url} failed: {str(error) or type(error).__name__}") from error
