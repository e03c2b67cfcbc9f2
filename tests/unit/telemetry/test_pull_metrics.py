"""Promised and delivered: what is counted of a settled pull, with bounded labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from epp.core.decision_record import DecisionRecord, PullState
from epp.core.types import KvSource, PullReport, SchedulingDecision, SourceChoice, SourceReason
from epp.telemetry.pull_metrics import MAX_PAIRS_KEPT, MAX_PAIRS_SHOWN, PullMetrics
from tests.unit.core.rows import candidate, endpoint, info


def settled(
    promised: int, report: tuple[int, int, int] | None, source: str = "b", computing: str = "a"
) -> DecisionRecord:
    """`report`: tokens asked, tokens and bytes received."""
    here = candidate(computing, engine=info())
    choice = SourceChoice(KvSource(endpoint(source), promised, promised), SourceReason.PULL)
    decision = SchedulingDecision(
        "d", "r", here.endpoint, (), None, choice, (), here.endpoint.id, 0, computed_by=here
    )
    if report is None:
        return DecisionRecord(0.0, decision, None, PullState.UNKNOWN)
    said = PullReport("d", "x", report[0], report[1], report[2], "any", 1.0)
    return DecisionRecord(0.0, decision, None, PullState.REPORTED, said)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"kvpull_epp_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("report", "outcome", "due", "kept"),
    [
        ((1000, 1000, 64_000), "kept", 1000, 1000),
        ((1200, 1200, 76_800), "kept", 1000, 1000),  # more than promised is no surplus of trust
        ((600, 600, 38_400), "kept", 600, 600),  # the engine had found 400 of its own
        ((1000, 400, 25_600), "short", 1000, 400),
        ((1000, 0, 0), "nothing", 1000, 0),
        ((0, 0, 0), "not_needed", 0, 0),
        (None, "unknown", 0, 0),
    ],
)
def test_what_a_pull_owed_and_kept(
    registry: CollectorRegistry, report: tuple[int, int, int] | None, outcome: str, due: int, kept: int
) -> None:
    PullMetrics(registry).settled(settled(1000, report))
    assert value(registry, "pulls_settled_total", outcome=outcome) == 1
    assert value(registry, "pull_due_tokens_total") == due
    assert value(registry, "pull_kept_tokens_total") == kept
    assert value(registry, "pull_delivered_tokens_total") == (report[1] if report else 0)
    assert value(registry, "pull_delivered_bytes_total") == (report[2] if report else 0)


def test_bytes_owed_follow_from_the_bytes_that_came(registry: CollectorRegistry) -> None:
    metrics = PullMetrics(registry)
    metrics.settled(settled(1000, (1000, 0, 0)))
    assert value(registry, "pull_due_bytes_total") == 0, "nobody has said yet what a token weighs"
    metrics.settled(settled(1000, (1000, 500, 32_000)))
    metrics.settled(settled(1000, (1000, 0, 0)))
    assert value(registry, "pull_due_bytes_total") == 2 * 64_000


def test_the_pairs_shown_are_few(registry: CollectorRegistry) -> None:
    metrics = PullMetrics(registry)
    for number in range(MAX_PAIRS_KEPT + 50):
        metrics.settled(settled(1 + (number < 3) * 1000, (10, 1, 1), source=f"s{number}"))
    (family,) = [f for f in registry.collect() if f.name == "kvpull_epp_pair_tokens"]
    assert len(family.samples) == 2 * (MAX_PAIRS_SHOWN + 1)
    assert value(registry, "pair_tokens", source="s2/0", destination="a/0", what="promised") == 1001
    totals = {"promised": 0.0, "delivered": 0.0}
    for sample in family.samples:
        totals[sample.labels["what"]] += sample.value
    assert totals == {"promised": MAX_PAIRS_KEPT + 50 + 3000, "delivered": MAX_PAIRS_KEPT + 50}
    assert value(registry, "pair_tokens", source="other", destination="other", what="delivered") > 4000


def test_nothing_is_counted_without_a_source(registry: CollectorRegistry) -> None:
    a = endpoint("a")
    choice = SourceChoice(None, SourceReason.NO_HOLDER)
    decision = SchedulingDecision("d", "r", a, (), None, choice, (), a.id, 0)
    PullMetrics(registry).settled(DecisionRecord(0.0, decision))
    assert all(s.value == 0 for f in registry.collect() for s in f.samples if not s.name.endswith("_created"))
