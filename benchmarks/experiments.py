"""`python -m benchmarks.experiments`: the experimental policies beside their peers, on hot prefixes.

In virtual time. One made-up workload (16 prefixes of 16,000 tokens, Zipf 1.2, Poisson arrivals, four
engines), each policy by its configuration alone. It says what the policies do to a tail, not what a
deployment would see: no protocol was committed before, and `simulator` has the published workloads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from epp.config import parse_config
from epp.core.thresholds import PullSettings
from epp.engine_model.profile import ModelProfile, TransferTiming
from epp.engine_model.timing import PRESETS
from simulator.clients import RateStages
from simulator.engine import EngineShape
from simulator.fleet import Fleet, FleetShape
from simulator.summary import percentile
from simulator.what_if import COST, settings_of

ROOT = Path(__file__).resolve().parents[1]
SHAPE = FleetShape(
    engines=4,
    shape=EngineShape(block_tokens=64, device_tokens=200_000, cpu_tokens=400_000),
    gateway_s=0.0,
)
PROFILE = ModelProfile(
    "gpt-oss-120b",
    41_500,
    PRESETS["gpt-oss-120b"],
    TransferTiming(floor_s=0.02, stream_bytes_per_s=10e9, session_s=6.0, restore_floor_s=0.008),
)


def arms() -> dict[str, tuple[str, PullSettings | None]]:
    """Configuration and thresholds by name."""
    sample = (ROOT / "config" / "epp" / "second-copy.yaml").read_text()
    without = sample.replace("      - pluginRef: kvpull-second-copy-filter\n", "")
    policies = ROOT / "simulator/data/policies"
    soonest = (ROOT / "config" / "epp" / "predicted-ttft.yaml").read_text()
    return {
        "affinity": (without, None),
        "affinity, second copy": (sample, None),
        "predicted TTFT": (soonest, settings_of(COST, PROFILE)),
        "token-aware + P2P": ((policies / "tokenaware-p2p.yaml").read_text(), None),
        "token-aware + requests + P2P": ((policies / "tokenaware-requests-p2p.yaml").read_text(), None),
        "load + P2P": ((ROOT / "config" / "epp" / "load-first.yaml").read_text(), None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    client = RateStages(
        prefixes=16,
        prefix_tokens=16_000,
        question_tokens=500,
        output_tokens=200,
        rates_per_s=(arguments.rate,),
        stage_s=60.0,
        warm_up_rate_per_s=2.0,
        warm_up_s=20.0,
        zipf=(1.2,),
    )
    for name, (config, thresholds) in arms().items():
        halves, tails, moved = [], [], []
        for seed in range(arguments.seeds):
            fleet = Fleet(SHAPE, PROFILE, parse_config(config, name), thresholds, seed=seed)
            records = client.run(fleet, seed)[-1].records
            times_s = sorted(r.ttft_s for r in records if r.ttft_s is not None)
            halves.append(percentile(times_s, 50))
            tails.append(percentile(times_s, 99))
            moved.append(fleet.network.moved_bytes / 2**30)
        p50, p99, gib = (sum(found) / arguments.seeds for found in (halves, tails, moved))
        print(f"{name:>22}: TTFT p50 {p50:.3f} s, p99 {p99:.2f} s, moved {gib:.1f} GiB")


if __name__ == "__main__":
    main()
