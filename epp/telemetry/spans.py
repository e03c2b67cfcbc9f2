"""What became of the spans of this picker."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.tracing.exporter import SpanExporter


class SpanCollector(Collector):
    """`exporter` None: tracing is off."""

    def __init__(self, exporter: SpanExporter | None) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvpull_epp_spans", "Spans given to the collector, or dropped.", labels=["result"]
        )
        if self._exporter is not None:
            family.add_metric(["sent"], self._exporter.sent)
            family.add_metric(["dropped"], self._exporter.dropped)
        yield family
