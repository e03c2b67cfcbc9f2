"""Figures of a stage, and of several seeds of it. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.clients import Stage

# Student's t, two-sided 95%, by degrees of freedom; the last one for all above
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 1.96)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds with the half width of its 95% interval (0 with one seed)."""

    mean: float
    half_width: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """NaN where a seed has no such figure: what never happened has no mean."""
        mean = statistics.fmean(values)
        if math.isnan(mean):
            return cls(mean, 0.0, len(values))
        if len(values) < 2:
            return cls(mean, 0.0, len(values))
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, _T95[min(len(values) - 2, len(_T95) - 1)] * error, len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between ranks; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(stage: Stage) -> dict[str, float]:
    """Figures by name, units in the names. The rate counts from the first arrival to the last answer."""
    records = stage.records
    if stage.window_s is None:
        until_s = max((r.ended_s for r in records if r.ended_s is not None), default=stage.began_s)
    else:
        until_s = stage.began_s + stage.window_s
    good = [r for r in records if not r.failed and (r.ended_s is None or r.ended_s <= until_s)]
    wall_s = max(until_s - stage.began_s, 1e-9)
    ttfts = [r.ttft_s for r in good if r.ttft_s is not None]
    latencies = [r.latency_s for r in good if r.latency_s is not None]
    prompt = max(1, sum(r.prompt_tokens for r in records))
    figures: dict[str, float] = {
        "requests": len(records),
        "failed": sum(bool(r.failed) for r in records),
        "wall_s": wall_s,
        "rate_per_s": len(good) / wall_s,
        "ttft_mean_s": statistics.fmean(ttfts) if ttfts else math.nan,
        "latency_mean_s": statistics.fmean(latencies) if latencies else math.nan,
    }
    for percent in (50, 90, 95, 99):
        figures[f"ttft_p{percent}_s"] = percentile(ttfts, percent)
        figures[f"latency_p{percent}_s"] = percentile(latencies, percent)
    figures |= {
        "tpot_p50_ms": percentile(
            [
                (r.ended_s - r.first_token_s) / (r.output_tokens - 1) * 1e3
                for r in good
                if r.ended_s is not None and r.first_token_s is not None and r.output_tokens > 1
            ],
            50,
        ),
        "device_hit_share": sum(r.device_hit_tokens for r in records) / prompt,
        "restored_share": sum(r.restored_tokens for r in records) / prompt,
        "pulled_share": sum(r.pulled_tokens for r in records) / prompt,
        "computed_share": sum(r.computed_tokens for r in records) / prompt,
        "pulls": sum(r.pulled_tokens > 0 for r in records),
        "pulled_gib": sum(r.pulled_bytes for r in records) / 2**30,
        "busiest_share": _busiest(Counter(r.computing for r in records)),
    }
    if preemptions := sum(r.preemptions for r in records):
        figures["preemptions"] = preemptions
    return figures


def _busiest(served: Mapping[str, int]) -> float:
    """Requests of the busiest endpoint over the mean of those that served any."""
    return max(served.values()) / statistics.fmean(served.values()) if served else math.nan
