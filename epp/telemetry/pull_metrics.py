"""What was promised of pulls and what came: the inputs of the promise-kept ratio, and who pulls from whom.

Fed with records whose pull is settled. A pull *owes* what was promised, or what the engine asked for
where that is less (it had found blocks of its own meanwhile). Pulls without a report owe nothing here:
they are counted as unknown. Labels are bounded: the pairs shown are the busiest few, the rest is `other`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.decision_record import DecisionRecord

MAX_PAIRS_SHOWN = 20
MAX_PAIRS_KEPT = 4096
OTHER = "other"
_MAX_BYTES_PER_TOKEN_KEYS = 64


class PullMetrics(Collector):
    """Counters of settled pulls, and a gauge of the busiest pairs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._outcomes = Counter(
            "kvpull_epp_pulls_settled",
            "Pulls named, by what became of them: kept, short, nothing, not_needed, unknown.",
            ["outcome"],
            registry=registry,
        )
        self._due_tokens = _counter(registry, "pull_due_tokens", "Tokens that reported pulls owed.")
        self._kept_tokens = _counter(registry, "pull_kept_tokens", "Of the tokens owed, those that came.")
        self._due_bytes = _counter(
            registry, "pull_due_bytes", "Bytes owed, at the bytes a token that engines have reported."
        )
        self._delivered_tokens = _counter(registry, "pull_delivered_tokens", "Tokens received by pulls.")
        self._delivered_bytes = _counter(registry, "pull_delivered_bytes", "Bytes received by pulls.")
        self.reports = Counter(
            "kvpull_epp_pull_reports",
            "PullFinished messages: joined, unmatched (no such pull of this engine), malformed.",
            ["result"],
            registry=registry,
        )
        self._bytes_per_token: dict[str, float] = {}
        self._pairs: dict[tuple[str, str], list[int]] = {}  # promised, delivered
        registry.register(self)

    def settled(self, record: DecisionRecord) -> None:
        """Count one pull whose end is known, or given up on."""
        report, source = record.report, record.decision.choice.source
        if source is None:
            return
        delivered = report.received_tokens if report else 0
        self._count_pair(str(source.endpoint.id), str(record.decision.computing), record, delivered)
        self._outcomes.labels(_outcome(record)).inc()
        if report is None:
            return
        due = min(record.promised_tokens, report.asked_tokens)
        self._due_tokens.inc(due)
        self._kept_tokens.inc(min(due, report.received_tokens))
        self._due_bytes.inc(due * self._learn_bytes_per_token(record))
        self._delivered_tokens.inc(report.received_tokens)
        self._delivered_bytes.inc(report.received_bytes)

    def _learn_bytes_per_token(self, record: DecisionRecord) -> float:
        """Of this kind of engine (its compared identity), from its own reports; 0 before the first."""
        row, report = record.decision.computed_by, record.report
        key = row.metrics.info.pull_key if row is not None and row.metrics.info is not None else ""
        room = key in self._bytes_per_token or len(self._bytes_per_token) < _MAX_BYTES_PER_TOKEN_KEYS
        if report is not None and report.received_tokens and room:
            self._bytes_per_token[key] = report.received_bytes / report.received_tokens
        return self._bytes_per_token.get(key, 0.0)

    def _count_pair(self, source: str, computing: str, record: DecisionRecord, delivered: int) -> None:
        pair = (source, computing)
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS_KEPT:
            pair = (OTHER, OTHER)
        totals = self._pairs.setdefault(pair, [0, 0])
        totals[0] += record.promised_tokens
        totals[1] += delivered

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "kvpull_epp_pair_tokens",
            f"Tokens promised and delivered since the start, of the {MAX_PAIRS_SHOWN} busiest pairs.",
            labels=["source", "destination", "what"],
        )
        ranked = sorted(self._pairs.items(), key=lambda item: (item[0] == (OTHER, OTHER), -item[1][0]))
        rest = [0, 0]
        for number, ((source, computing), totals) in enumerate(ranked):
            if number < MAX_PAIRS_SHOWN and source != OTHER:
                gauge.add_metric([source, computing, "promised"], totals[0])
                gauge.add_metric([source, computing, "delivered"], totals[1])
            else:
                rest = [rest[0] + totals[0], rest[1] + totals[1]]
        gauge.add_metric([OTHER, OTHER, "promised"], rest[0])
        gauge.add_metric([OTHER, OTHER, "delivered"], rest[1])
        yield gauge


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"kvpull_epp_{name}", text, registry=registry)


def _outcome(record: DecisionRecord) -> str:
    report = record.report
    if report is None:
        return "unknown"
    due = min(record.promised_tokens, report.asked_tokens)
    if due == 0:
        return "not_needed"
    if report.received_tokens == 0:
        return "nothing"
    return "kept" if report.received_tokens >= due else "short"
