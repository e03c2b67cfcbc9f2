"""Orders to pull ahead of a request (experimental): how they ended, and why turns ended without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class PrefetchFacts(Protocol):
    """What is shown; read only."""

    @property
    def ended(self) -> Mapping[str, int]: ...
    @property
    def skipped(self) -> Mapping[str, int]: ...
    @property
    def received_bytes(self) -> int: ...


class PrefetchCollector(Collector):
    """`facts` None: nothing is ever ordered."""

    def __init__(self, facts: PrefetchFacts | None) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts
        ended = CounterMetricFamily(
            "kvpull_epp_prefetch_orders", "Orders to pull ahead, by how they ended.", labels=["result"]
        )
        skipped = CounterMetricFamily(
            "kvpull_epp_prefetch_skipped", "Turns that ended without an order, by reason.", labels=["reason"]
        )
        for result, count in sorted(facts.ended.items()) if facts else ():
            ended.add_metric([result], count)
        for reason, count in sorted(facts.skipped.items()) if facts else ():
            skipped.add_metric([reason], count)
        yield ended
        yield skipped
        yield CounterMetricFamily(
            "kvpull_epp_prefetch_received_bytes",
            "Bytes that ordered pulls brought.",
            value=facts.received_bytes if facts else 0,
        )
