"""What requests asked for, cost and got, under the names and labels of the reference (`llm_d_epp_request_*`).

Names that clients choose are bounded: a model has a label of its own once an engine has answered for it (or
says that it is its base model), the first `MAX_FAIRNESS_IDS` fairness ids have one, and all label sets
together are at most `MAX_SERIES`; everything else is `other`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.types import GAP_BOUNDS_S, Outcome
from epp.extproc.events import Degradation
from epp.telemetry.histogram import PlainHistogram
from epp.telemetry.label_names import OTHER, LabelNames

MAX_MODELS: Final = 48
MAX_FAIRNESS_IDS: Final = 32
MAX_SERIES: Final = 64  # a page has 170 lines for each
LABELS: Final = ("model_name", "target_model_name", "fairness_id", "priority")

_TOKENS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
_BYTES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_HISTOGRAMS: Final = {
    "size_bytes": ("Request bodies as they came.", _BYTES),
    "response_size_bytes": ("Answers, in bytes of body.", _BYTES),
    "input_tokens": ("Prompt, as the engine counts it.", _TOKENS),
    "output_tokens": ("Generated, as the engine counts it.", _TOKENS),
    "cached_tokens": ("Prompt tokens found in a cache.", (0, *_TOKENS)),
    "duration_seconds": ("Decision to end of stream.", _SECONDS),
    "ntpot_seconds": ("Whole request by output token.", _TOKEN_SECONDS),
    "streaming_tpot_seconds": ("First to last output, by output token after the first.", _TOKEN_SECONDS),
    "streaming_itl_seconds": ("Between two pieces of streamed output.", GAP_BOUNDS_S),
}
_NO_PREFIX: Final = {"response_size_bytes"}  # its name does not begin with request_
_Labels = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What a request is counted under, as it came. `target`: the model the engine is asked for."""

    model: str = ""
    target: str = ""
    fairness_id: str = ""
    priority: int = 0


class RequestSeries:
    """The figures of one label set."""

    __slots__ = ("errors", "histograms", "running", "total", "ttft_s")

    def __init__(self) -> None:
        self.total = 0
        self.running = 0
        self.errors: Counter[str] = Counter()
        self.histograms = {name: PlainHistogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.ttft_s = (PlainHistogram(_SECONDS), PlainHistogram(_SECONDS))  # whole answers, streamed ones


class RequestMetrics(Collector):
    """One instance a registry. Everything is counted on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_model = PrometheusCounter(
            "kvpull_epp_requests_by_model",
            "base: the pool's base model; other: an adapter, or a name nobody told us of; none: not named.",
            ["model"],
            registry=registry,
        )
        self._usage = PrometheusCounter(
            "kvpull_epp_answers",
            "Good, whole answers by whether their token usage could be read.",
            ["usage"],
            registry=registry,
        )
        self._models = LabelNames(MAX_MODELS)
        self._fairness_ids = LabelNames(MAX_FAIRNESS_IDS)
        self._series: dict[_Labels, RequestSeries] = {}
        registry.register(self)

    def asked(self, names: RequestNames, size_bytes: int, *, is_base: bool) -> RequestSeries:
        """A request has been understood, or not, and will be routed or refused."""
        self._by_model.labels("none" if not names.model else "base" if is_base else "other").inc()
        if is_base:
            self._models.admit(names.target)
        series = self._find(names)
        series.total += 1
        series.histograms["size_bytes"].observe(size_bytes)
        return series

    def label(self, model: str) -> str:
        """The bounded label of a model's name."""
        return self._models.known(model)

    def refused(self, series: RequestSeries, reason: str) -> None:
        series.errors[reason] += 1

    def unread(self, reason: str) -> None:
        """A request that was refused before anything of it was known."""
        series = self._find(RequestNames())
        series.total += 1
        series.errors[reason] += 1

    def started(self, series: RequestSeries) -> None:
        """It is on its way to an endpoint; `ended` follows."""
        series.running += 1

    def ended(self, series: RequestSeries, names: RequestNames, outcome: Outcome, duration_s: float) -> None:
        """A request has ended. Failed and broken ones report no figures but their duration."""
        series.running -= 1
        histograms = series.histograms
        histograms["duration_seconds"].observe(duration_s)
        if outcome.ttft_s is not None:
            series.ttft_s[outcome.streamed].observe(outcome.ttft_s)
        if outcome.output is not None:  # the gaps of a stream add up to it
            histograms["streaming_itl_seconds"].add(outcome.output.gap_counts, outcome.output.first_to_last_s)
        if outcome.status is not None and outcome.status >= 400:
            series.errors[f"status_{outcome.status // 100}xx"] += 1
        if not outcome.completed or outcome.status is None or not 200 <= outcome.status < 300:
            return
        self._models.admit(names.target)
        self._models.admit(names.model)
        self._usage.labels("unread" if outcome.prompt_tokens is None else "read").inc()
        histograms["response_size_bytes"].observe(outcome.response_bytes)
        if outcome.prompt_tokens is not None:
            histograms["input_tokens"].observe(outcome.prompt_tokens)
        if outcome.cached_tokens is not None:
            histograms["cached_tokens"].observe(outcome.cached_tokens)
        tokens = outcome.completion_tokens
        if tokens:
            histograms["output_tokens"].observe(tokens)
            histograms["ntpot_seconds"].observe(duration_s / tokens)
            if outcome.output is not None and tokens > 1:
                histograms["streaming_tpot_seconds"].observe(outcome.output.first_to_last_s / (tokens - 1))

    def _find(self, names: RequestNames) -> RequestSeries:
        known = self._models.known
        fairness_id = self._fairness_ids.admit(names.fairness_id)
        labels = (known(names.model), known(names.target), fairness_id, str(names.priority))
        series = self._series.get(labels)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                labels = (OTHER, OTHER, OTHER, OTHER)
            series = self._series.setdefault(labels, RequestSeries())
        return series

    # --- shown ------------------------------------------------------------------------------------
    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily("llm_d_epp_request", "Requests seen.", labels=LABELS)
        errors = CounterMetricFamily(
            "llm_d_epp_request_error",
            "Requests refused, by reason, and answers with a status from 400 on.",
            labels=(*LABELS, "error_code"),
        )
        running = GaugeMetricFamily(
            "llm_d_epp_request_running", "Sent to an endpoint and not ended.", labels=LABELS
        )
        ttft = HistogramMetricFamily(
            "llm_d_epp_request_ttft_seconds",
            "From the gateway's first message to the first output.",
            labels=(*LABELS, "streaming"),
        )
        for labels, series in self._series.items():
            total.add_metric(labels, series.total)
            running.add_metric(labels, series.running)
            for reason, count in series.errors.items():
                errors.add_metric((*labels, reason), count)
            for streamed, histogram in zip(("false", "true"), series.ttft_s, strict=True):
                histogram.show(ttft, (*labels, streamed))
        yield from (total, errors, running, ttft)
        for name, (text, _) in _HISTOGRAMS.items():
            prefix = "llm_d_epp_" if name in _NO_PREFIX else "llm_d_epp_request_"
            family = HistogramMetricFamily(prefix + name, text, labels=LABELS)
            for labels, series in self._series.items():
                series.histograms[name].show(family, labels)
            yield family


class DegradedCollector(Collector):
    """What the gateway's configuration keeps from the picker, in conversations that showed it."""

    def __init__(self, counts: Callable[[], Mapping[Degradation, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvpull_epp_degraded", "Conversations by what was missing.", labels=["what"]
        )
        counts = self._counts()
        for kind in Degradation:
            family.add_metric([kind.name.lower()], counts.get(kind, 0))
        yield family
