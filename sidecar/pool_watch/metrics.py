"""Metrics of the watches, the same in picker and sidecar: age of the cache, and what was met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.pool_watch.status import WatchStatus

_COUNTERS = (
    ("lists", "Whole lists taken."),
    ("watches", "Watches started."),
    ("expired", "Times that the server had forgotten our revision (410)."),
    ("failures", "Failures of a list or a watch."),
    ("unreadable", "Objects left out because they could not be understood."),
)


class WatchCollector(Collector):
    """Reads the statuses at each scrape. Several watches of one resource count as one: the oldest age."""

    def __init__(self, statuses: Callable[[], Iterable[WatchStatus]], clock: Callable[[], float]) -> None:
        self._statuses = statuses
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        by_resource: dict[str, list[WatchStatus]] = {}
        for status in self._statuses():
            by_resource.setdefault(status.resource, []).append(status)
        yield self._gauge("synced", "1: the cache has been whole, and may be served.", by_resource, _synced)
        yield self._gauge(
            "cache_age_seconds",
            "Since the API server last spoke; above 120: a memory.",
            by_resource,
            self._age,
        )
        for name, text in _COUNTERS:
            family = CounterMetricFamily(f"kvpull_kube_{name}", text, labels=["resource"])
            for resource, watches in by_resource.items():
                family.add_metric([resource], sum(getattr(watch, name) for watch in watches))
            yield family

    def _gauge(
        self,
        name: str,
        text: str,
        by_resource: dict[str, list[WatchStatus]],
        value: Callable[[list[WatchStatus]], float | None],
    ) -> Metric:
        family = GaugeMetricFamily(f"kvpull_kube_{name}", text, labels=["resource"])
        for resource, watches in by_resource.items():
            sample = value(watches)
            if sample is not None:
                family.add_metric([resource], sample)
        return family

    def _age(self, watches: list[WatchStatus]) -> float | None:
        ages = [age for watch in watches if (age := watch.age_s(self._clock())) is not None]
        return max(ages) if len(ages) == len(watches) else None


def _synced(watches: list[WatchStatus]) -> float:
    return float(all(watch.synced for watch in watches))
