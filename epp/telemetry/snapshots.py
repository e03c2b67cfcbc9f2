"""Metrics of the snapshots between replicas, read when Prometheus asks. Whether the engines confirmed
what was taken over is counted with their events (`snapshots_confirmed`, `snapshots_refused`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.siblings.client import Snapshot
from epp.siblings.holding import HoldingCounters
from epp.siblings.server import ServerCounters


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """`fetched` None: no sibling was asked; `served` None: none is given."""

    fetched: Snapshot | None
    holding: HoldingCounters
    held: int
    refused: Mapping[str, int]  # by our index, by reason
    served: ServerCounters | None


class SnapshotCollector(Collector):
    """What came of the snapshot at start, and what was given to others."""

    def __init__(self, facts: Callable[[], SnapshotFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        if facts.fetched is not None:
            yield from _fetched(facts, facts.fetched)
        if facts.served is not None:
            served = CounterMetricFamily(
                "kvpull_epp_snapshots_given", "Siblings that asked, by outcome.", labels=["outcome"]
            )
            counts = asdict(facts.served)
            sent_bytes = counts.pop("sent_bytes")
            sent_rows, skipped_rows = counts.pop("sent_rows"), counts.pop("skipped_rows")
            for outcome, count in counts.items():
                served.add_metric([outcome], count)
            yield served
            yield CounterMetricFamily("kvpull_epp_snapshot_sent_bytes", "To siblings.", value=sent_bytes)
            rows = CounterMetricFamily(
                "kvpull_epp_snapshot_sent_rows", "Endpoints given.", labels=["outcome"]
            )
            rows.add_metric(["sent"], sent_rows)
            rows.add_metric(["skipped"], skipped_rows)
            yield rows


def _fetched(facts: SnapshotFacts, fetched: Snapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "kvpull_epp_snapshot_fetch_info", "1: what came of asking siblings at start.", labels=["outcome"]
    )
    info.add_metric([fetched.outcome], 1.0)
    yield info
    yield GaugeMetricFamily(
        "kvpull_epp_snapshot_received_bytes", "Of the snapshot at start.", value=fetched.received_bytes
    )
    rows = GaugeMetricFamily(
        "kvpull_epp_snapshot_rows",
        "Endpoints of the snapshot at start, by what became of them.",
        labels=["outcome"],
    )
    refused = sum(facts.refused.values())
    rows.add_metric(["waiting"], facts.held)
    rows.add_metric(["adopted"], facts.holding.offered - refused)
    rows.add_metric(["moved"], facts.holding.moved)
    rows.add_metric(["expired"], facts.holding.expired)
    for reason, count in facts.refused.items():
        rows.add_metric([f"refused_{reason}"], count)
    yield rows
