"""How the reading of engines' metrics goes: pages, failures by reason, and how late it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ScrapeFacts(Protocol):
    """What is shown; read only."""

    @property
    def pages(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def stretch(self) -> float: ...


class ScrapeCollector(Collector):
    """`llm_d_epp_datalayer_poll_errors_total` as the reference has it, and ours besides."""

    def __init__(self, facts: ScrapeFacts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts
        yield CounterMetricFamily(
            "kvpull_epp_scraped_pages", "Pages of metrics that were read.", value=facts.pages
        )
        failures = CounterMetricFamily(
            "kvpull_epp_scrape_failures", "Scrapes that brought nothing, by reason.", labels=["reason"]
        )
        for reason, count in facts.failures.items():
            failures.add_metric([reason], count)
        yield failures
        errors = CounterMetricFamily(
            "llm_d_epp_datalayer_poll_errors", "Scrapes that brought nothing.", labels=["source_type"]
        )
        errors.add_metric(["metrics-data-source"], sum(facts.failures.values()))
        yield errors
        yield GaugeMetricFamily(
            "kvpull_epp_scrape_stretch",
            "Time between two pages of an endpoint, in times of the interval that was asked for.",
            value=facts.stretch,
        )
