"""Decisions of every committed policy under one seed, as committed: a change of policy shows itself here.

The engines' times are fixed below, so that a new calibration changes none of them. Where a change is wanted:
`python -m tests.unit.simulator.test_golden_policies` writes `golden_policies.json` again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from epp.engine_model.profile import ModelProfile, TransferTiming
from epp.engine_model.timing import EngineTiming
from simulator.calibration import DATA
from simulator.clients import RateStages
from simulator.engine import EngineShape
from simulator.experiment import load_policy
from simulator.fleet import Fleet, FleetShape
from simulator.what_if import COST, settings_of

GOLDEN = Path(__file__).parent / "golden_policies.json"
POLICIES = sorted(path.stem for path in (DATA / "policies").glob("*.yaml"))
TIMING = EngineTiming(8192, 27.0, 24.5, 0.5, 4.2, 0.35, 9.2)
PROFILE = ModelProfile("golden", 41_500, TIMING, TransferTiming(0.01, 10e9, restore_floor_s=0.008))
# prompts longer than every policy's threshold (16,384 is the highest), more of them than a device tier holds
CLIENTS = RateStages(
    prefixes=6, prefix_tokens=17_408, question_tokens=64, output_tokens=48, rates_per_s=(12.0,), stage_s=2.5
)


def decisions(policy: str) -> list[str]:
    """Destination, computing endpoint and source of each request."""
    disagg = policy.startswith(("glm", "pd"))
    shape = FleetShape(
        engines=4,
        shape=EngineShape(block_tokens=64, device_tokens=60_000, cpu_tokens=200_000),
        roles={"prefill": 2, "decode": 2} if disagg else {},
        gateway_s=0.01,
    )
    settings = settings_of(COST, PROFILE) if policy == "predicted-p2p" else None
    fleet = Fleet(shape, PROFILE, load_policy(policy), settings, seed=1)
    fleet.prime()
    CLIENTS.run(fleet, 1)
    fleet.check()
    return [line.partition(" ")[2].replace("engine-000", "") for line in fleet.decisions]


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_those_committed(policy: str) -> None:
    assert decisions(policy) == json.loads(GOLDEN.read_text())[policy]


def test_the_committed_decisions_tell_policies_apart() -> None:
    """The negative control: pulls where they are on, never where they are off, and different placements."""
    golden = json.loads(GOLDEN.read_text())
    assert sorted(golden) == POLICIES
    for policy, lines in golden.items():
        assert len(lines) >= 20
        named = sum(not line.endswith("-") for line in lines)
        assert not named or policy.endswith("-p2p"), policy
    assert any(not line.endswith("-") for line in golden["load-p2p"])
    placements = {
        name: [line.split()[0] for line in golden[name]] for name in ("affinity", "load", "tokenaware")
    }
    assert len({tuple(found) for found in placements.values()}) == 3


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({p: decisions(p) for p in POLICIES}, indent=0) + "\n")
    sys.exit(0)
