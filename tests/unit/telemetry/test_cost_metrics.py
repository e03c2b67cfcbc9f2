"""What cost mode would have done is counted beside what the threshold says, whichever decides."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from epp.core.pull_curves import PullPrediction
from epp.core.types import SourceChoice, SourceReason
from epp.telemetry.cost_metrics import CostMetrics

LABELS = ("cost", "threshold", "decided_by")


def choice(
    gain: int, *, delta: int | None = 1000, sure: bool = True, by_cost: bool = False, pull_ms: float = 50.0
) -> SourceChoice:
    predicted = PullPrediction(
        gain_tokens=gain,
        pull_ms=pull_ms,
        recompute_ms=100.0,
        margin_ms=20.0,
        hidden_ms=10.0,
        cold_ms=0.0,
        sure=sure,
    )
    reason = SourceReason.PULL
    return SourceChoice(None, reason, min_cached_token_delta=delta, predicted=predicted, by_cost=by_cost)


@pytest.mark.parametrize(
    ("made", "labels", "regret_ms"),
    [
        (choice(2000), ("pull", "pull", "threshold"), None),
        (choice(500), ("pull", "compute", "threshold"), 60.0),
        (choice(500, by_cost=True), ("pull", "compute", "cost"), 60.0),
        (choice(2000, pull_ms=200.0), ("compute", "pull", "threshold"), 90.0),
        (choice(500, delta=None), ("pull", "compute", "threshold"), 60.0),
        (choice(500, sure=False), ("unsure", "compute", "threshold"), None),
    ],
)
def test_both_verdicts_are_counted(
    made: SourceChoice, labels: tuple[str, str, str], regret_ms: float | None
) -> None:
    registry = CollectorRegistry()
    CostMetrics(registry).decided(made)
    verdicts = dict(zip(LABELS, labels, strict=True))
    assert registry.get_sample_value("kvpull_epp_cost_verdicts_total", verdicts) == 1.0
    regret = registry.get_sample_value("kvpull_epp_threshold_regret_ms_total", {"threshold": labels[1]})
    assert regret == regret_ms


def test_without_a_price_nothing_is_counted() -> None:
    registry = CollectorRegistry()
    CostMetrics(registry).decided(SourceChoice(None, SourceReason.NO_HOLDER))
    assert not [s for m in registry.collect() for s in m.samples if s.name.endswith("_total")]
