"""The engine's /metrics: vLLM 0.32's names, and ours from `engine_plugin.wire`. Reads, never counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.local.engine.config import EngineConfig
from deploy.local.engine.core import Engine
from deploy.local.engine.counters import TTFT_BUCKETS_S
from engine_plugin import wire
from engine_plugin.transport import TransportStats
from engine_plugin.transport.stats import DURATION_BOUNDS_S, Durations

Rows = Mapping[tuple[()], float] | Mapping[tuple[str], float]  # values by label values
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics(Collector):
    """One page for one engine."""

    def __init__(
        self,
        engine: Engine,
        stats: Callable[[], TransportStats],
        config: EngineConfig,
        info: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._config = config
        self._info = dict(info)
        self._labels = {"engine": str(config.rank), "model_name": config.served_name}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._cache()
        yield self._ttft()
        yield from self._transfers()

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        labels = self._labels if labels is None else labels
        family = GaugeMetricFamily(name, text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, rows: Rows, *labels: str) -> Metric:
        """`rows`: values by the label values that `labels` name, beside the engine's own labels."""
        family = CounterMetricFamily(
            name.removesuffix("_total"),
            text,
            labels=(*self._labels, *labels) if labels else tuple(self._labels),
        )
        for values, value in rows.items():
            family.add_metric((*self._labels.values(), *values), value)
        return family

    def _load(self) -> Iterator[Metric]:
        scheduler, counters = self._engine.parts.scheduler, self._engine.parts.counters
        yield self._gauge("vllm:num_requests_running", "Requests in execution.", scheduler.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting.", scheduler.waiting)
        tokens = {(): float(counters.generation)}
        yield self._counter("vllm:generation_tokens_total", "Tokens generated.", tokens)
        finished = {(reason,): float(n) for reason, n in counters.finished_requests.items()}
        yield self._counter("vllm:request_success_total", "Requests finished.", finished, "finished_reason")
        refused = {("max_num_queued_reqs",): float(scheduler.refused)}
        yield self._counter("vllm:admission_rejections_total", "Requests refused.", refused, "reason")

    def _cache(self) -> Iterator[Metric]:
        parts = self._engine.parts
        counters, device = parts.counters, parts.cache.device
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Device blocks in use, 0..1.", device.in_use / device.slots
        )
        config = {
            "block_size": str(self._config.block_size),
            "num_gpu_blocks": str(device.slots),
            "num_cpu_blocks": str(parts.cache.cpu.slots),
            "prefix_caching_hash_algo": self._config.hash_algo,
            "engine": str(self._config.rank),
        }
        yield self._gauge("vllm:cache_config_info", "Cache configuration.", 1.0, config)
        for name, value in (
            ("vllm:prefix_cache_queries", counters.prefix_queries),
            ("vllm:prefix_cache_hits", counters.prefix_hits),
            ("vllm:external_prefix_cache_queries", counters.external_queries),
            ("vllm:external_prefix_cache_hits", counters.external_hits),
        ):
            yield self._counter(name, "In tokens.", {(): float(value)})
        by_source = {(source,): float(n) for source, n in counters.cached_by_source.items()}
        yield self._counter(
            "vllm:prompt_tokens_cached_by_source_total", "Prompt tokens not computed.", by_source, "source"
        )
        yield self._counter(
            "kvpull_corrupt_blocks_total",
            "Blocks whose bytes were wrong.",
            {(): float(counters.corrupt_blocks)},
        )

    def _ttft(self) -> Metric:
        counters = self._engine.parts.counters
        family = HistogramMetricFamily(
            "vllm:time_to_first_token_seconds", "Time to first token.", labels=tuple(self._labels)
        )
        total, buckets = 0, []
        bounds = [*map(str, TTFT_BUCKETS_S), "+Inf"]
        for bound, count in zip(bounds, counters.ttft_buckets, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(tuple(self._labels.values()), buckets, counters.ttft_sum_s)
        return family

    def _transfers(self) -> Iterator[Metric]:
        stats, parts = self._stats(), self._engine.parts
        yield self._gauge(wire.ENGINE_INFO, "What peers compare.", 1.0, self._info)
        yield _by_label(wire.PEER_REFUSED_TOTAL, "Peers refused.", stats.refused, "peer", "reason")
        yield _by_label(wire.PULL_RECEIVED_BYTES_TOTAL, "Bytes received.", stats.received_bytes, "peer")
        yield _by_label(wire.PULL_SERVED_BYTES_TOTAL, "Bytes served.", stats.served_bytes, "peer")
        pulls = dict(stats.pulls) | dict(parts.puller.ignored)
        yield _by_label(wire.PULLS_TOTAL, "Pulls by outcome.", pulls, "reason")
        yield self._gauge(wire.LEASES, "Leases held.", parts.store.leases, {})
        cpu = parts.cache.cpu
        yield self._gauge(wire.CPU_TIER_FILL, "CPU slots that hold blocks, 0..1.", len(cpu) / cpu.slots, {})
        unfinished = {(): float(stats.handshakes_unfinished)}
        yield self._counter(wire.HANDSHAKES_UNFINISHED_TOTAL, "Callers that proved nothing.", unfinished)
        yield _seconds(wire.SESSION_SETUP_SECONDS, "Dial to acceptance of a peer.", stats.session_setup_s)
        yield _seconds(wire.TRANSFER_SECONDS, "Of pulls, first chunk to last check.", stats.transfer_s)
        yield self._gauge(
            "kvpull_quarantined_slots", "CPU slots in quarantine.", parts.cache.cpu.quarantined, {}
        )


def _seconds(name: str, text: str, durations: Durations) -> Metric:
    family = HistogramMetricFamily(name, text)
    bounds = [*map(str, DURATION_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
    family.add_metric((), buckets, durations.total_s)
    return family


def _by_label(
    name: str, text: str, rows: Mapping[str, int] | Mapping[tuple[str, str], int], *labels: str
) -> Metric:
    family = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    for key, value in rows.items():
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family
