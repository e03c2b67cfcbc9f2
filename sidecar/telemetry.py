"""Counters and histograms of one sidecar process. Every label value is from a fixed set.

Own registry, no global state: two sidecars in one process (tests) do not share figures.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sidecar.plan import Dropped
from sidecar.tracing.exporter import SpanExporter

_LEG_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Telemetry:
    """What the sidecar counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._seconds: dict[str, Histogram] = {}  # of legs
        self._requests = self._counter("requests", "Requests by plan and outcome.", "plan", "outcome")
        self._active = Gauge(
            "kvpull_sidecar_active_requests", "Requests being served now.", registry=self.registry
        )
        self._pulls = self._counter("pulls_requested", "Legs sent with a remote_kv_source.", "leg")
        self._pulls_ended = self._counter(
            "pulls_ended",
            "Answers to legs with a pull: cached (some prompt tokens), nothing, or unknown (no figure).",
            "leg",
            "outcome",
        )
        self._pull_cached = self._counter(
            "pull_cached_tokens",
            "Prompt tokens not computed in answers to legs with a pull: pulled and own cache together.",
            "leg",
        )
        self._suspected = self._counter(
            "suspected", "Times an endpoint was left alone for a while after a failure.", "part"
        )
        self._dropped = self._counter(
            "routing_headers_dropped", "Routing headers not followed, by reason.", "header", "reason"
        )
        self._skipped = self._counter(
            "pulls_skipped", "Requests whose named source was not used, by reason.", "reason"
        )
        self._client_params = self._counter(
            "client_params_removed", "Bodies in which a client had set kv_transfer_params."
        )
        self._clients = Gauge(
            "kvpull_sidecar_client_connections", "Open connections of clients.", registry=self.registry
        )
        self._connections = self._counter(
            "upstream_connections",
            "Connections to the own engine (decoder) or peers (prefiller).",
            "to",
            "event",
        )
        self._legs = self._counter("legs", "Legs by outcome.", "leg", "outcome")
        self._leg_seconds = Histogram(
            "kvpull_sidecar_leg_seconds",
            "Time from sending a leg to its first answer (prefill: to its end).",
            ("leg",),
            buckets=_LEG_BUCKETS_S,
            registry=self.registry,
        )
        self._retries = self._counter("retries", "Legs sent once more.", "kind")
        self._fallbacks = self._counter(
            "prefill_fallbacks", "Split requests served by the own engine alone, by reason.", "reason"
        )
        self._usage = self._counter(
            "usage_corrections", "Cached-token figures of decode answers that the prefill leg had computed."
        )
        self._file_errors = self._counter("endpoint_file_errors", "Endpoint files that were not taken.")
        self._members = Gauge(
            "kvpull_sidecar_members",
            "Members of the pool, as its file or the API server tells.",
            registry=self.registry,
        )

        self._spans = Gauge(
            "kvpull_sidecar_spans",
            "Spans given to the collector, or dropped.",
            ("result",),
            registry=self.registry,
        )

    def _count(self, counter: Counter, *labels: str) -> None:
        """One more. Labels are from fixed sets, so what is looked up once is kept."""
        key = (counter, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        child.inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvpull_sidecar_{name}", text, labels, registry=self.registry)

    def request_started(self) -> None:
        self._active.inc()

    def request_ended(self, plan: str, outcome: str) -> None:
        self._active.dec()
        self._count(self._requests, plan, outcome)

    def count_clients(self, count: Callable[[], float]) -> None:
        """`count` is asked at every scrape."""
        self._clients.set_function(count)

    def upstream_connection(self, to: str, event: str) -> None:
        self._count(self._connections, to, event)

    def header_dropped(self, dropped: Dropped) -> None:
        self._count(self._dropped, dropped.header, dropped.reason)

    def pull_requested(self, leg: str) -> None:
        self._count(self._pulls, leg)

    def pull_ended(self, leg: str, outcome: str, cached_tokens: int) -> None:
        self._count(self._pulls_ended, leg, outcome)
        self._pull_cached.labels(leg).inc(cached_tokens)

    def suspected(self, part: str) -> None:
        self._count(self._suspected, part)

    def pull_skipped(self, reason: str) -> None:
        self._count(self._skipped, reason)

    def client_params_removed(self) -> None:
        self._client_params.inc()

    def leg_ended(self, leg: str, outcome: str, seconds: float | None = None) -> None:
        self._count(self._legs, leg, outcome)
        if seconds is not None:
            if leg not in self._seconds:
                self._seconds[leg] = self._leg_seconds.labels(leg)
            self._seconds[leg].observe(seconds)

    def retried(self, kind: str) -> None:
        self._count(self._retries, kind)

    def fell_back(self, reason: str) -> None:
        self._count(self._fallbacks, reason)

    def usage_corrected(self, count: int) -> None:
        self._usage.inc(count)

    def endpoint_file(self, *, rows: int, failed: bool) -> None:
        self._members.set(rows)
        if failed:
            self._file_errors.inc()

    def pool_members(self, count: int) -> None:
        self._members.set(count)

    def watch_spans(self, exporter: SpanExporter) -> None:
        """Count what becomes of them."""
        self._spans.labels("sent").set_function(lambda: exporter.sent)
        self._spans.labels("dropped").set_function(lambda: exporter.dropped)

    def value(self, name: str, **labels: str) -> float:
        """One sample as a number, 0 when it was never touched (tests, debug)."""
        return self.registry.get_sample_value(name, labels) or 0.0


def metrics_app(telemetry: Telemetry) -> web.Application:
    """The application of the metrics port: GET /metrics and GET /health."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(telemetry.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    return app
