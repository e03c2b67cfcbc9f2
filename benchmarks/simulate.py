"""`make bench NAME=simulate`: what a simulation costs, and every published row beside the simulated one.

The cost is the processor time of document Q&A (2,304 requests, 16 endpoints) on one core, beside a plain
loop of the same process, so that a busy machine shows. Rows: crossover tables (fitted), fleets (predicted,
one seed unless --seeds). Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from simulator.experiment import experiment_names, load_experiment, run_job
from simulator.runner import default_processes, jobs_of, run_jobs
from simulator.tables import crossovers, measure, ratio_rows

LOOP = 5_000_000


def loop_s() -> float:
    """Processor time of a loop that does next to nothing."""
    began, total = time.process_time(), 0
    for number in range(LOOP):
        total += number
    return time.process_time() - began


def docqa_core_s() -> float:
    """Processor time of both runs under load-aware placement with pulls, the dearest arm."""
    spec = load_experiment("document-qa")
    began = time.process_time()
    figures = run_job(spec, "load + P2P", 1)
    spent = time.process_time() - began
    assert sum(stage["requests"] for stage in figures.values()) == 2304
    return spent


def crossover_rows() -> list[dict[str, Any]]:
    rows = []
    for model, table in crossovers().items():
        for row in table:
            for leg in ("recompute", "pull"):
                rows.append(
                    {
                        "row": f"{model} {leg} at {row.prefix_tokens}",
                        "published": getattr(row, f"published_{leg}_ms"),
                        "simulated": getattr(row, f"simulated_{leg}_ms"),
                        "origin": "fitted",
                    }
                )
    return rows


def fleet_rows(seeds: int, processes: int) -> list[dict[str, Any]]:
    rows = []
    for name in experiment_names():
        spec = load_experiment(name)
        if not spec.ratios:
            continue
        compared = sorted({arm for ratio in spec.ratios for arm in (ratio.of, ratio.over)})
        results = run_jobs(jobs_of(name, spec, seeds=seeds, arms=compared), processes)
        used = {(p.arm, p.stage, p.figure) for p in spec.published if p.used_for}
        for row in ratio_rows(spec, measure(results)):
            r = row.ratio
            partly = {(r.of, r.stage, r.figure), (r.over, r.stage, r.figure)} & used
            rows.append(
                {
                    "row": f"{name} {r.figure} {r.of} / {r.over} at {r.stage}",
                    "published": row.published,
                    "simulated": row.simulated,
                    "origin": "partly used" if partly else "predicted",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=default_processes())
    options = parser.parse_args()
    loop, core_s = loop_s(), docqa_core_s()
    print(f"document Q&A, 2,304 requests: {core_s:.1f} s of one core ({core_s / loop:.0f} plain loops)")
    rows = crossover_rows() + fleet_rows(options.seeds, options.jobs)
    for row in rows:
        error = row["simulated"] / row["published"] - 1
        figures = f"{row['published']:>10.3f} {row['simulated']:>10.3f} {error:+7.0%}"
        print(f"{row['row']:75} {figures} {row['origin']}")
    print(json.dumps({"docqa_core_s": core_s, "docqa_loops": core_s / loop, "ratios": rows}))


if __name__ == "__main__":
    main()
