"""Metrics of flow control by the reference's names (`llm_d_epp_flow_control_*`), read when Prometheus asks.

No label comes from a request: a fairness id is the client's to choose, so its label says only whether one
was given.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.flow.bands import NO_LIMIT
from epp.flow.admission import Admission, Asking, Shedding
from epp.flow.controller import FlowController

_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PREFIX = "llm_d_epp_flow_control"


class FlowMetrics:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self._pool = pool
        self._waited_s = Histogram(
            f"{_PREFIX}_request_queue_duration_seconds",
            "From a request's arrival until it went on, was refused or left.",
            ["priority", "outcome", "inference_pool"],
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def waited(self, asking: Asking, outcome: str, waited_s: float) -> None:
        self._waited_s.labels(str(asking.priority), outcome, self._pool).observe(waited_s)


class FlowCollector(Collector):
    """What waits now, and how full the pool was seen last."""

    def __init__(self, admission: Admission, pool: str) -> None:
        self._admission = admission
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        admission = self._admission
        if isinstance(admission, Shedding):
            shed = CounterMetricFamily(
                "kvpull_epp_requests_shed", "Refused for their priority while the pool was saturated."
            )
            shed.add_metric([], admission.shed)
            yield shed
        if not isinstance(admission, FlowController):
            return
        yield from self._waiting(admission)
        counters = admission.counters
        total = CounterMetricFamily(
            f"{_PREFIX}_requests",
            "Requests by how their wait ended.",
            labels=["outcome", "priority", "inference_pool"],
        )
        for (outcome, priority), count in counters.outcomes.items():
            total.add_metric([outcome, str(priority), self._pool], count)
        yield total
        full = GaugeMetricFamily(
            f"{_PREFIX}_pool_saturation", "1 and more: full; -1: no endpoint.", labels=["inference_pool"]
        )
        full.add_metric([self._pool], -1.0 if counters.saturation is None else counters.saturation)
        yield full

    def _waiting(self, admission: FlowController) -> Iterator[Metric]:
        labels = ["priority", "inference_pool"]
        size = GaugeMetricFamily(f"{_PREFIX}_queue_size", "Requests that wait.", labels=labels)
        size_bytes = GaugeMetricFamily(f"{_PREFIX}_queue_bytes", "Their bodies.", labels=labels)
        for priority, fill in admission.queue.fill.items():
            size.add_metric([str(priority), self._pool], fill.requests)
            size_bytes.add_metric([str(priority), self._pool], fill.bytes)
        yield size
        yield size_bytes
        yield from self._shares(admission)

    def _shares(self, admission: FlowController) -> Iterator[Metric]:
        """Of what may wait, what does; a limit that is none has no share."""
        queue, pool = admission.queue, self._pool
        limits = queue.settings
        for what, waiting, most in (
            ("requests", len(queue), limits.max_requests),
            ("bytes", queue.bytes, limits.max_bytes),
        ):
            band = GaugeMetricFamily(
                f"{_PREFIX}_capacity_utilization_{what}",
                "Of what may wait in a band.",
                labels=["priority", "inference_pool"],
            )
            for priority, fill in queue.fill.items():
                limit = getattr(fill.settings, f"max_{what}")
                if limit < NO_LIMIT:
                    band.add_metric([str(priority), pool], getattr(fill, what) / limit)
            yield band
            whole = GaugeMetricFamily(
                f"{_PREFIX}_global_capacity_utilization_{what}",
                "Of what may wait in all bands together.",
                labels=["inference_pool"],
            )
            if most < NO_LIMIT:
                whole.add_metric([pool], waiting / most)
            yield whole
