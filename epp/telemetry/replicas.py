"""Metrics of several replicas: how many are known to live, and whether this one leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.leases.choice import HaFacts


class ReplicaCollector(Collector):
    """`facts` are asked at every scrape."""

    def __init__(self, facts: Callable[[], HaFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        mode = GaugeMetricFamily("kvpull_epp_ha_info", "1: how replicas work together.", labels=["mode"])
        mode.add_metric([facts.mode.value], 1)
        yield mode
        yield GaugeMetricFamily(
            "kvpull_epp_replicas",
            "Live replicas that share the pull limits (active-active); 0: not known.",
            value=facts.replicas,
        )
        yield GaugeMetricFamily("kvpull_epp_leader", "1: this replica serves.", value=float(facts.leads))
        yield GaugeMetricFamily(
            "kvpull_epp_lease_failing", "1: its Lease could not be renewed.", value=float(bool(facts.error))
        )
