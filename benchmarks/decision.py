"""`make bench NAME=decision`: the source rule alone, `choose_source` on 1,024 ready candidates.

Pools: `graded` (every endpoint holds a different depth), `tie` (all hold the whole prefix: the band is
the pool), `classes` (as tie, with two source classes that have terms of their own), `refused` (the
deepest half is incompatible), `cost` (as tie, decided by cost mode). The sampled holder is priced in each.
CPU time of this thread, the median of the least disturbed batch of calls; the ratio is against one pass that
only reads each candidate's prefix.
`us_1024` is the slowest of graded, tie and cost. Then cost mode against the threshold on the local fleet
(`benchmarks.decision_cost`; minutes). Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks import decision_cost
from engine_plugin.identity import EndpointId
from epp.core.kv_source import choose_source
from epp.core.pull_cost import PullCosts
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.thresholds import MODE_COST, SOURCE_CLASS_LABEL, SourcePolicy
from epp.core.types import (
    Candidate,
    ClaimState,
    Endpoint,
    EndpointMetrics,
    EngineInfo,
    InflightLoad,
    PrefixMatch,
    SchedulingRequest,
    SourceReason,
)

CANDIDATES = 1_024
BLOCK_TOKENS = 16
BLOCKS = 3_000
REPEATS = 600
BATCH = 20
LIMIT_US = 500
POLICY = SourcePolicy(configured=True, min_cached_token_delta=2_048, max_inflight_pulls=8)
COST = replace(
    POLICY,
    mode=MODE_COST,
    recompute_seed=RecomputeCurve(20.0, 25.0, 0.25),
    pull_seed=PullCurve(25.0, 4.0, 256.0),
)
CLASSES = SourcePolicy(
    configured=True,
    min_cached_token_delta=2_048,
    by_class={
        "near": SourcePolicy(configured=True, min_cached_token_delta=1_024),
        "far": SourcePolicy(configured=True, min_cached_token_delta=8_192),
    },
)


def row(number: int, blocks: int, seed_fp: str = "s") -> Candidate:
    host = f"10.{number >> 8}.{number & 255}.1"
    endpoint = Endpoint(
        EndpointId(f"pod-{number:04d}"),
        host,
        8000,
        {"llm-d.ai/role": "both", SOURCE_CLASS_LABEL: ("near", "far")[number % 2]},
    )
    info = EngineInfo(f"{number:032x}", BLOCK_TOKENS, "sha256", seed_fp, "m", "l", "1", f"{host}:7777")
    metrics = EndpointMetrics(0.0, float(number % 7), 1.0, 0.5, BLOCK_TOKENS, info)
    return Candidate(
        endpoint,
        metrics,
        InflightLoad(number % 5, 0, number % 3),
        PrefixMatch(ClaimState.LIVE, blocks, blocks, blocks, BLOCK_TOKENS),
    )


def pools() -> dict[str, tuple[list[Candidate], SourcePolicy]]:
    numbers = range(CANDIDATES)
    graded = [row(n, max(8, BLOCKS * (n + 1) // CANDIDATES)) for n in numbers]
    tie = [row(n, BLOCKS) for n in numbers]
    refused = [
        row(n, BLOCKS * (n + 1) // CANDIDATES, "s" if n < CANDIDATES // 2 else "other") for n in numbers
    ]
    return {
        "graded": (graded, POLICY),
        "tie": (tie, POLICY),
        "classes": (tie, CLASSES),
        "refused": (refused, POLICY),
        "cost": (tie, COST),
    }


def median_us(call: Callable[[int], object]) -> float:
    """Median of the batch that others on this machine disturbed least."""
    medians = []
    for batch in range(0, REPEATS, BATCH):
        samples = []
        for number in range(batch, batch + BATCH):
            before = time.thread_time_ns()
            call(number)
            samples.append(time.thread_time_ns() - before)
        medians.append(statistics.median(samples))
    return min(medians) / 1e3


def measure(rows: Sequence[Candidate], policy: SourcePolicy) -> float:
    """Raises SystemExit where the rule did not do what this benchmark is about."""
    computing = row(CANDIDATES, 0)
    requests = [SchedulingRequest(f"request-{n}", "m", range(BLOCKS * BLOCK_TOKENS)) for n in range(REPEATS)]
    for request in requests[:3]:
        if choose_source(request, rows, computing, policy).reason is not SourceReason.PULL:
            raise SystemExit("no source was named: nothing was measured")
    pricing = partial(PullCosts().predict, now_s=0.0)
    return median_us(lambda n: choose_source(requests[n], rows, computing, policy, frozenset(), pricing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule-only", action="store_true", help="no fleet: without the wrong shares")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{CANDIDATES} candidates, {BLOCKS} blocks; limit {LIMIT_US} us")
    print(f"{'pool':>10} {'us':>8} {'x one pass':>11}")
    for name, (rows, policy) in pools().items():
        pass_us = median_us(lambda _, rows=rows: [c.match.cpu_blocks for c in rows])  # type: ignore[misc]
        figures[f"us_1024_{name}"] = took_us = round(measure(rows, policy))
        print(f"{name:>10} {took_us:>8} {took_us / pass_us:>11.1f}")
    figures["us_1024"] = max(figures[f"us_1024_{name}"] for name in ("graded", "tie", "cost"))
    if not arguments.rule_only:
        figures |= decision_cost.main()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
