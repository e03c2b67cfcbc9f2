"""Prometheus metrics of the picker: counters fed by the director, gauges read from the core at scrape.

Names of the reference (`llm_d_epp_*`) where it has the thing, `kvpull_epp_*` where it has not.
Labels never come unbounded from user input.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.types import ClaimState, SchedulingDecision, SourceReason
from epp.extproc.conversations import STREAM_BOUNDS_S, ServiceStats
from epp.telemetry.cost_metrics import CostMetrics
from epp.telemetry.histogram import PlainHistogram
from epp.telemetry.request_metrics import RequestMetrics
from epp.telemetry.scheduler_attempts import SchedulerAttempts
from epp.thresholds.in_force import ThresholdState

log = logging.getLogger(__name__)

MAX_REFUSALS = 128  # kept and told of one endpoint: what it reports is its own word
_DECISION_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_FAST_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
_SPLIT = {True: "prefill-decode", False: "decode-only"}


class PickerMetrics:
    """Counters and histograms the director writes to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.schedule_s = Histogram(
            "llm_d_epp_scheduler_e2e_duration_seconds",
            "One schedule call.",
            buckets=_FAST_SECONDS,
            registry=registry,
        )
        self.processing_s = Histogram(
            "llm_d_epp_request_processing_duration_seconds",
            "Whole decision: parse, tokenise, match, schedule.",
            buckets=_DECISION_SECONDS,
            registry=registry,
        )
        self.rewrites = Counter(
            "llm_d_epp_model_rewrite_decisions",
            "Requests that were asked of another model than they named.",
            ["model_rewrite_name", "model_name", "target_model"],
            registry=registry,
        )
        self.disagg = Counter(
            "llm_d_epp_disagg_decision",
            "Decisions by whether the prompt is computed elsewhere.",
            ["decision_type"],
            registry=registry,
        )
        # looking a label set up costs as much as counting it three times
        self._disagg_of = {split: self.disagg.labels(_SPLIT[split]) for split in _SPLIT}
        self.attempts = SchedulerAttempts(registry)
        self.decisions = Counter(
            "kvpull_epp_source_decisions",
            "Decisions by reason for or against a pull.",
            ["reason"],
            registry=registry,
        )
        self._decisions_of: dict[SourceReason, Counter] = {}
        self.promised_tokens = Counter(
            "kvpull_epp_pull_promised_tokens", "Tokens by which named sources out-cached.", registry=registry
        )
        self.unverified_sources = Counter(
            "kvpull_epp_unverified_sources",
            "Sources named although one of the two engines reports no kvpull_engine_info.",
            registry=registry,
        )
        self.prefill_missing = Counter(
            "kvpull_epp_prefill_missing",
            "Requests that were to be split and found no prefill endpoint; decoded without one.",
            registry=registry,
        )
        self.untokenised = Counter(
            "kvpull_epp_untokenised_requests", "Routed by load only.", ["reason"], registry=registry
        )
        self.salts = Counter(
            "kvpull_epp_trusted_salts",
            "Bodies whose cache salt was set here, by what the gateway's header said.",
            ["header"],
            registry=registry,
        )
        self.request = RequestMetrics(registry)
        self._costs = CostMetrics(registry)

    def decided(self, decision: SchedulingDecision, seconds: float) -> None:
        self.schedule_s.observe(seconds)
        self._disagg_of[decision.prefill is not None].inc()
        reason = decision.choice.reason
        counter = self._decisions_of.get(reason)
        if counter is None:
            counter = self._decisions_of[reason] = self.decisions.labels(reason.value)
        counter.inc()
        if decision.prefill_missing:
            self.prefill_missing.inc()
        self._costs.decided(decision.choice)
        if decision.choice.source is not None:
            self.promised_tokens.inc(decision.choice.source.gain_tokens)
            self.unverified_sources.inc(not decision.choice.source.verified)


class PeerRefusals:
    """What engines say of peers they refused (`kvpull_peer_refused_total`), latest page of each."""

    def __init__(self) -> None:
        self._pages: dict[EndpointId, Mapping[tuple[str, str], float]] = {}
        self._told: dict[EndpointId, set[tuple[str, str]]] = {}

    def update(self, endpoint: EndpointId, refused: Mapping[tuple[str, str], float]) -> None:
        """Every (endpoint, peer, reason) is logged once; an endpoint may cause a bounded number of lines."""
        kept = dict(itertools.islice(refused.items(), MAX_REFUSALS))
        told = self._told.setdefault(endpoint, set())
        for peer, reason in kept.keys() - told:
            if len(told) < MAX_REFUSALS:
                told.add((peer, reason))
                log.warning("endpoint %s refused peer %.100r: %.100r", endpoint, peer, reason)
        self._pages[endpoint] = kept

    def forget(self, endpoint: EndpointId) -> None:
        self._pages.pop(endpoint, None)
        self._told.pop(endpoint, None)

    def rows(self) -> Iterator[tuple[str, str, str, float]]:
        """Endpoint, peer, reason, count."""
        for endpoint, page in self._pages.items():
            for (peer, reason), count in page.items():
                yield str(endpoint), peer, reason, count


class StreamCollector(Collector):
    """Conversations with the gateway: what is open now must come back to zero."""

    def __init__(self, stats: Callable[[], ServiceStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "kvpull_epp_extproc_open",
            "Streams open, decisions being made, decisions not ended.",
            labels=["what"],
        )
        stats = self._stats()
        counts = {
            "streams": stats.streams_open,
            "deciding": stats.deciding,
            "decisions": stats.decisions_open,
        }
        for what, count in counts.items():
            gauge.add_metric([what], count)
        yield gauge
        yield GaugeMetricFamily(
            "llm_d_epp_extproc_streams_inflight", "Streams open.", value=stats.streams_open
        )
        ended = CounterMetricFamily(
            "llm_d_epp_extproc_streams", "Streams ended, by gRPC status.", labels=["code"]
        )
        for code, count in stats.ended.items():
            ended.add_metric([code], count)
        yield ended
        lasted = HistogramMetricFamily(
            "llm_d_epp_extproc_stream_duration_seconds", "How long streams lasted.", labels=[]
        )
        PlainHistogram.of(STREAM_BOUNDS_S, stats.lasted, stats.lasted_s).show(lasted, [])
        yield lasted


class PoolCollector(Collector):
    """Gauges of the pool, its cache claims and the thresholds, read when Prometheus asks."""

    def __init__(
        self,
        picker: EndpointPicker,
        threshold_state: Callable[[], ThresholdState],
        refusals: PeerRefusals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._picker = picker
        self._threshold_state = threshold_state
        self._refusals = refusals
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield from self._endpoints()
        yield from self._cache()
        yield from self._thresholds()

    def _endpoints(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily(
            "kvpull_epp_inflight_requests", "Requests sent and not ended.", labels=["endpoint"]
        )
        pulls = GaugeMetricFamily("kvpull_epp_pulls_outstanding", "By source.", labels=["endpoint"])
        unverified = GaugeMetricFamily(
            "kvpull_epp_endpoint_unverified", "1: reports no kvpull_engine_info.", labels=["endpoint"]
        )
        incompatible = GaugeMetricFamily(
            "kvpull_epp_endpoint_incompatible",
            "1: the two endpoints cannot exchange blocks because `field` differs.",
            labels=["endpoint", "other", "field"],
        )
        rows = self._picker.snapshot(self._clock())
        for row in rows:
            name = str(row.candidate.endpoint.id)
            inflight.add_metric([name], row.candidate.load.requests)
            pulls.add_metric([name], row.candidate.load.pulls_served)
            unverified.add_metric([name], float(row.candidate.metrics.info is None))
            for other, field in row.incompatible_with.items():
                incompatible.add_metric([name, other, field], 1.0)
        refused = CounterMetricFamily(
            "kvpull_epp_peer_refused", "As the engines count it.", labels=["endpoint", "peer", "reason"]
        )
        for endpoint, peer, reason, count in self._refusals.rows():
            refused.add_metric([endpoint, peer, reason], count)
        yield from (inflight, pulls, unverified, incompatible, refused)

    def _cache(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "kvpull_epp_claim_state",
            "1 for the state an endpoint's index is in.",
            labels=["endpoint", "state"],
        )
        blocks = GaugeMetricFamily("kvpull_epp_index_blocks", "Blocks indexed.", labels=["endpoint", "tier"])
        speculative = GaugeMetricFamily(
            "kvpull_epp_speculative_entries",
            "Prompts sent there whose blocks are not confirmed; overdue ones until they are swept.",
            labels=["endpoint"],
        )
        deaf = GaugeMetricFamily(
            "kvpull_epp_endpoint_deaf", "1: sends events, none could be applied.", labels=["endpoint"]
        )
        events = CounterMetricFamily(
            "kvpull_epp_kv_events", "Cache events by what became of them.", labels=["endpoint", "outcome"]
        )
        differs = GaugeMetricFamily(
            "kvpull_epp_endpoint_differs",
            "1: the endpoint is unlike the others of its pool in `what` (block_size, block_hashes).",
            labels=["endpoint", "what"],
        )
        cache = self._picker.cache
        sizes = cache.differing_block_sizes()
        hashes = {found.endpoint for found in cache.hash_disagreements()}
        for endpoint in self._picker.endpoints:
            name, stats = str(endpoint.id), cache.stats(endpoint.id)
            differs.add_metric([name, "block_size"], float(endpoint.id in sizes))
            differs.add_metric([name, "block_hashes"], float(endpoint.id in hashes))
            for value in ClaimState:
                state.add_metric([name, value.value], float(stats.state is value))
            deaf.add_metric([name], float(stats.deaf))
            speculative.add_metric([name], stats.speculative_entries)
            blocks.add_metric([name, "device"], stats.index.device_blocks)
            blocks.add_metric([name, "cpu"], stats.index.cpu_blocks)
            blocks.add_metric([name, "window_groups"], stats.index.window_blocks)
            for outcome, count in asdict(stats.counters).items():
                events.add_metric([name, outcome], count)
        yield from (state, blocks, speculative, deaf, events, differs)
        yield GaugeMetricFamily(
            "kvpull_epp_index_bytes",
            "Bytes of the index, as counted against its bound.",
            value=cache.index_bytes,
        )

    def _thresholds(self) -> Iterator[Metric]:
        current, policy = self._threshold_state(), self._picker.sources.policy()
        yield GaugeMetricFamily(
            "kvpull_epp_threshold_generation", "Generation in force.", value=current.generation
        )
        yield GaugeMetricFamily(
            "kvpull_epp_threshold_rejected",
            "1: newest content refused.",
            value=float(current.rejected is not None),
        )
        yield GaugeMetricFamily(
            "kvpull_epp_threshold_warnings",
            "Settings that two documents disagree on.",
            value=len(current.warnings),
        )
        yield GaugeMetricFamily(
            "kvpull_epp_pulls_enabled", "1: a source may be named.", value=float(policy.active)
        )
