"""Gauges of the pool under the reference's names, read from the core when Prometheus asks.

Averages and deviations are of what is known: an endpoint that was not scraped, or too long ago, is in none of
them, and a pool of which nothing is known has no sample. Must not count anything itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.endpoint_picker import EndpointPicker
from epp.core.types import EndpointMetrics
from epp.telemetry.label_names import endpoint_name

_FIGURES: dict[str, Callable[[EndpointMetrics], float | None]] = {
    "kv_cache_utilization": lambda metrics: metrics.kv_usage,
    "queue_size": lambda metrics: metrics.waiting_requests,
    "running_requests": lambda metrics: metrics.running_requests,
}

_APPROX = "approx-prefix-cache-producer"


class PoolGauges(Collector):
    """`name`: of the pool, as its label."""

    def __init__(
        self, picker: EndpointPicker, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._picker = picker
        self._name = name
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now_s = self._clock()
        rows = self._picker.rows(now_s)
        ready = GaugeMetricFamily(
            "llm_d_epp_ready_endpoints", "Endpoints that take requests.", labels=["name"]
        )
        ready.add_metric([self._name], sum(not row.endpoint.draining for row in rows))
        yield ready
        for figure, read in _FIGURES.items():
            known = [value for row in rows if (value := read(row.metrics)) is not None]
            for prefix, reduce in (("average", statistics.fmean), ("std_dev", statistics.pstdev)):
                gauge = GaugeMetricFamily(
                    f"llm_d_epp_{prefix}_{figure}", "Of endpoints whose value is known.", labels=["name"]
                )
                if known:
                    gauge.add_metric([self._name], reduce(known))
                yield gauge
        queue = GaugeMetricFamily(
            "llm_d_epp_per_endpoint_queue_size",
            "Waiting requests, where known.",
            labels=["name", "model_server_endpoint"],
        )
        labels = ["endpoint_name", "namespace", "producer_name", "fairness_id", "priority"]
        requests = GaugeMetricFamily(
            "llm_d_epp_inflight_requests", "Sent there and not ended.", labels=labels
        )
        tokens = GaugeMetricFamily(
            "llm_d_epp_inflight_tokens", "Prompt tokens to be computed there.", labels=labels
        )
        age = GaugeMetricFamily(
            "kvpull_epp_metrics_age_seconds",
            "Since the last page of its metrics; no sample: there was none.",
            labels=["endpoint"],
        )
        for row in rows:
            name, pod = str(row.endpoint.id), endpoint_name(row.endpoint)
            if row.metrics.waiting_requests is not None:
                queue.add_metric([self._name, name], row.metrics.waiting_requests)
            if row.metrics.scraped_at_s is not None:
                age.add_metric([name], max(0.0, now_s - row.metrics.scraped_at_s))
            requests.add_metric([pod, "", "", "", ""], row.load.requests)
            tokens.add_metric([pod, "", "", "", ""], row.load.uncached_prompt_tokens)
        yield from (queue, requests, tokens, age)
        placed = self._picker.placed_blocks
        if placed is not None:
            size = GaugeMetricFamily(
                "llm_d_epp_prefix_indexer_size",
                "Blocks of prompts that endpoints were given, as far as is remembered.",
                labels=["plugin_name", "plugin_type"],
            )
            size.add_metric([_APPROX, _APPROX], placed)
            yield size
