"""Metrics of the configuration in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ConfigCollector(Collector):
    """`facts`: generation in force, and whether the newest content was refused; asked at every scrape."""

    def __init__(self, facts: Callable[[], tuple[int, bool]]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        generation, rejected = self._facts()
        yield GaugeMetricFamily(
            "kvpull_epp_config_generation", "Configuration in force, counted from 1.", value=generation
        )
        yield GaugeMetricFamily(
            "kvpull_epp_config_rejected",
            "1: the newest content of the configuration file is not in force.",
            value=float(rejected),
        )
