"""What single requests cost and how fast their answers came: histograms fed at their ends.

Names of the reference (`llm_d_epp_*`) where it has the thing. No label comes from a request: model
names of clients are told apart as the base model's and others only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.types import GAP_BOUNDS_S, Outcome, OutputTiming
from epp.extproc.events import Degradation

_TOKENS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
_BYTES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class RequestMetrics:
    """One instance a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"llm_d_epp_request_{name}", text, buckets=buckets, registry=registry)

        self._by_model = Counter(
            "kvpull_epp_requests_by_model",
            "base: the pool's base model; other: an adapter, or a name nobody told us of; none: not named.",
            ["model"],
            registry=registry,
        )
        self._usage = Counter(
            "kvpull_epp_answers",
            "Good, whole answers by whether their token usage could be read.",
            ["usage"],
            registry=registry,
        )
        self._size_bytes = histogram("size_bytes", "Request bodies as they came.", _BYTES)
        self._input_tokens = histogram("input_tokens", "Prompt, as the engine counts it.", _TOKENS)
        self._output_tokens = histogram("output_tokens", "Generated, as the engine counts it.", _TOKENS)
        self._cached_tokens = histogram("cached_tokens", "Prompt tokens found in a cache.", (0, *_TOKENS))
        self._ntpot_s = histogram("ntpot_seconds", "Whole request by output token.", _TOKEN_SECONDS)
        self._tpot_s = histogram(
            "streaming_tpot_seconds",
            "First to last output, by output token after the first.",
            _TOKEN_SECONDS,
        )
        self._gaps = GapHistogram()
        registry.register(self._gaps)

    def asked(self, model: str, size_bytes: int, *, is_base: bool) -> None:
        """A request has been understood, or not, and will be routed. `model` is what it names."""
        self._by_model.labels("none" if not model else "base" if is_base else "other").inc()
        self._size_bytes.observe(size_bytes)

    def ended(self, outcome: Outcome, duration_s: float) -> None:
        """A request has ended. Failed and broken ones report no figures."""
        if outcome.output is not None:
            self._gaps.add(outcome.output)
        if not outcome.completed or outcome.status is None or not 200 <= outcome.status < 300:
            return
        self._usage.labels("unread" if outcome.prompt_tokens is None else "read").inc()
        if outcome.prompt_tokens is not None:
            self._input_tokens.observe(outcome.prompt_tokens)
        if outcome.cached_tokens is not None:
            self._cached_tokens.observe(outcome.cached_tokens)
        if outcome.completion_tokens:
            self._output(outcome.completion_tokens, outcome.output, duration_s)

    def _output(self, tokens: int, timing: OutputTiming | None, duration_s: float) -> None:
        self._output_tokens.observe(tokens)
        self._ntpot_s.observe(duration_s / tokens)
        if timing is not None and tokens > 1:
            self._tpot_s.observe(timing.first_to_last_s / (tokens - 1))


class GapHistogram(Collector):
    """Gaps between pieces of streamed output. Summed up by stream: one observation a token would cost
    more than everything else that happens to a token here."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, timing: OutputTiming) -> None:
        for number, count in enumerate(timing.gap_counts):
            self._counts[number] += count
        self._sum_s += timing.first_to_last_s  # the gaps of a stream add up to it

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "llm_d_epp_request_streaming_itl_seconds", "Between two pieces of streamed output."
        )
        buckets, total = [], 0
        for bound_s, count in zip((*GAP_BOUNDS_S, math.inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound_s == math.inf else str(bound_s), float(total)))
        family.add_metric([], buckets, self._sum_s)
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
