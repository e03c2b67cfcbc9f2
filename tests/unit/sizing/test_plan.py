"""Sizes of tiers and pods against the reference guide's figures, and each warning with its opposite."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epp import cli
from epp.core.pull_curves import PullCurve, RecomputeCurve, crossover_tokens
from epp.sizing.kv_layout import read_layout
from epp.sizing.plan import GIB, Machine, Workload, size
from tests.unit.sizing.test_kv_layout import GLM, GPT_OSS_120B, LLAMA_8B

LAYOUT = read_layout(LLAMA_8B)
WORKLOAD = Workload(context_tokens=16_384, concurrency=64, working_set_tokens=64 * 16_384, pods=4)
MACHINE = Machine(device_kv_tokens=500_000)


def findings(workload: Workload = WORKLOAD, machine: Machine = MACHINE) -> str:
    return "\n".join(size(LAYOUT, workload, machine).findings)


def test_the_guides_pod() -> None:
    """gpt-oss-120b, 1.22M device tokens: the guide gives the tier 88 GiB, /dev/shm 96 and the pod 160."""
    workload = Workload(1_024, 64, 4_000_000, 8)
    machine = Machine(device_kv_tokens=1_220_000, cpu_tier_bytes=88 * GIB)
    sizes = size(read_layout(GPT_OSS_120B), workload, machine)
    assert (sizes.pod_shm_bytes, sizes.pod_memory_bytes) == (96 * GIB, 160 * GIB)
    assert sizes.cpu_tier_bytes / sizes.device_kv_bytes == pytest.approx(1.87, abs=0.01)
    unasked = size(read_layout(GPT_OSS_120B), workload, replace(machine, cpu_tier_bytes=None))
    assert unasked.cpu_tier_bytes == 95 * GIB  # twice the device's KV, rounded up


def test_every_rank_of_a_pod_has_a_tier_in_its_shared_memory() -> None:
    one = size(LAYOUT, WORKLOAD, replace(MACHINE, cpu_tier_bytes=8 * GIB))
    eight = size(LAYOUT, WORKLOAD, replace(MACHINE, cpu_tier_bytes=8 * GIB, engines_per_pod=8))
    assert (one.pod_shm_bytes, eight.pod_shm_bytes) == (9 * GIB, 70 * GIB)


def test_published_pool_of_64_documents_has_nothing_against_it() -> None:
    """64 shared 16K prefixes on 4 pods: 2.1 times one pod's cache."""
    sizes = size(LAYOUT, replace(WORKLOAD, concurrency=16), replace(MACHINE, cpu_tier_bytes=64 * GIB))
    assert sizes.working_set_ratio == pytest.approx(2.1, abs=0.01)
    assert sizes.findings == ()


@pytest.mark.parametrize(
    ("workload", "machine", "sentence"),
    [
        ({}, {"cpu_tier_bytes": GIB}, "smaller than the KV of one context"),
        ({}, {"cpu_tier_bytes": 40 * GIB}, "smaller than the device's KV"),
        ({"working_set_tokens": 10_000_000}, {"cpu_tier_bytes": 64 * GIB}, "times all CPU tiers"),
        ({}, {"cpu_tier_bytes": 65 * GIB}, "one UCX stack"),
        ({"concurrency": 200}, {}, "queue or be preempted"),
        ({"pods": 1}, {}, "no peer"),
        ({"working_set_tokens": 400_000}, {}, "while they warm up"),
        ({"working_set_tokens": 630_000}, {}, "passing gain"),  # 1.26 times
        ({}, {"recompute": RecomputeCurve(0.0, 1.0)}, "never cheaper"),
        ({}, {"recompute": RecomputeCurve(0.0, 20.0), "pull_floor_ms": 1e3}, "pulls will not pay"),
    ],
)
def test_each_warning(workload: dict[str, Any], machine: dict[str, Any], sentence: str) -> None:
    calm = replace(WORKLOAD, concurrency=16), replace(MACHINE, cpu_tier_bytes=64 * GIB)
    assert findings(*calm) == ""
    assert sentence in findings(replace(calm[0], **workload), replace(calm[1], **machine))


@pytest.mark.parametrize(
    ("recompute", "pull", "expected"),
    [
        (RecomputeCurve(0.0, 100.0), PullCurve(500.0, 50.0), 10_000.0),
        (RecomputeCurve(0.0, 10.0, 1.0), PullCurve(110.0, 0.0), 6_618.95),  # 10us n + 1ns n^2 = 110 ms
        (RecomputeCurve(50.0, 10.0), PullCurve(10.0, 1.0), 0.0),
        (RecomputeCurve(0.0, 1.0), PullCurve(10.0, 2.0), math.inf),
        (RecomputeCurve(0.0, 2.0), PullCurve(10.0, 2.0), math.inf),
    ],
)
def test_crossover(recompute: RecomputeCurve, pull: PullCurve, expected: float) -> None:
    assert crossover_tokens(recompute, pull) == pytest.approx(expected, abs=0.5)


def command(path: Path, *more: str) -> list[str]:
    return [
        *("size", str(path), "--context", "24576", "--working-set", "6000000", "--concurrency", "64"),
        *("--pods", "4", "--device-tokens", "1200000", "--cpu-tier-gib", "60", *more),
    ]


def test_command_prints_glms_crossover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM's published tie is near 8,650 tokens, with a pull floor of 1.19 s."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM))
    more = ("--timing", "glm-5.2", "--pull-floor-ms", "1194", "--link-gb-s", "21.2", "--json")
    assert cli.main(command(path, *more)) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_token"] == 92_628
    assert 7_500 < answer["crossover_tokens"] < 9_000
    assert cli.main(command(path)) == 1
    assert "WARNING: the CPU tier (60.00 GiB) is smaller than the device's KV" in capsys.readouterr().out


def test_command_refuses_a_config_that_says_too_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert cli.main(command(path)) == 2
    assert "num_hidden_layers: missing" in capsys.readouterr().err
    path.write_text("[" * 100_000)
    assert cli.main(command(path)) == 2
