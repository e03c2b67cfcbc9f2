"""`llm_d_epp_scheduler_attempts_total`: what schedule calls ended in, by chosen endpoint.

Pods come and go for ever: what has left the pool is dropped when Prometheus asks, and between two of its
questions the least recently chosen series.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.types import Endpoint
from epp.telemetry.label_names import endpoint_name

MAX_SERIES: Final = 4096
SUCCESS, FAILURE = "success", "failure"
_Labels = tuple[str, str, str, str, str]


class SchedulerAttempts(Collector):
    """Counted on the event loop. `target_model` is a bounded label already."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: OrderedDict[_Labels, int] = OrderedDict()
        self.pool: Callable[[], Iterable[Endpoint]] | None = None  # None: nobody leaves
        registry.register(self)

    def chosen(self, endpoint: Endpoint, target_model: str) -> None:
        self._count((SUCCESS, target_model, endpoint_name(endpoint), "", str(endpoint.port)))

    def failed(self, target_model: str) -> None:
        self._count((FAILURE, target_model, "", "", ""))

    def _count(self, labels: _Labels) -> None:
        self._counts[labels] = self._counts.pop(labels, 0) + 1
        if len(self._counts) > MAX_SERIES:
            self._counts.popitem(last=False)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "llm_d_epp_scheduler_attempts",
            "Schedule calls.",
            labels=["status", "target_model_name", "endpoint_name", "namespace", "port"],
        )
        if self.pool is not None:
            names = {"", *map(endpoint_name, self.pool())}
            for labels in [labels for labels in self._counts if labels[2] not in names]:
                del self._counts[labels]
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family
