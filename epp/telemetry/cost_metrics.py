"""What cost mode says beside what the threshold says, of every decision that could price a holder.

Counted in either mode, so that an operator sees what switching would change before he switches. By the
predictions themselves, not by what came of them: `kvpull explain` and the ledger have that.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from epp.core.types import SourceChoice

PULL, COMPUTE, UNSURE = "pull", "compute", "unsure"


def threshold_says(choice: SourceChoice) -> str:
    """Of a choice that has a prediction."""
    delta, predicted = choice.min_cached_token_delta, choice.predicted
    reached = predicted is not None and delta is not None and predicted.gain_tokens >= delta
    return PULL if reached else COMPUTE


def cost_says(choice: SourceChoice) -> str:
    """The cheaper of the two, sure or not."""
    return PULL if choice.predicted is not None and choice.predicted.cheaper else COMPUTE


class CostMetrics:
    """Both verdicts, and what the threshold's would cost where they differ."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._verdicts = Counter(
            "kvpull_epp_cost_verdicts",
            "Decisions with a price: what the costs say (unsure: they do not know), what the threshold says, "
            "and which of them decided.",
            ["cost", "threshold", "decided_by"],
            registry=registry,
        )
        self._regret_ms = Counter(
            "kvpull_epp_threshold_regret_ms",
            "Milliseconds by which the threshold's choice is predicted to be dearer, where costs are sure.",
            ["threshold"],
            registry=registry,
        )

    def decided(self, choice: SourceChoice) -> None:
        predicted = choice.predicted
        if predicted is None:
            return
        threshold, cost = threshold_says(choice), cost_says(choice)
        decided_by = "cost" if choice.by_cost else "threshold"
        self._verdicts.labels(cost if predicted.sure else UNSURE, threshold, decided_by).inc()
        if predicted.sure and threshold != cost:
            gap_ms = abs(predicted.recompute_ms - max(0.0, predicted.pull_ms - predicted.hidden_ms))
            self._regret_ms.labels(threshold).inc(gap_ms)
