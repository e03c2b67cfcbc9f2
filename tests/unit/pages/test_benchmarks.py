"""A benchmark that nobody ran for months still fits the code it measures: each can be imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.transfer import measures

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"timed_tier", "index_peer"}  # run inside vLLM, and beside Dynamo
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ELSEWHERE)


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_they_are_all_found() -> None:
    assert {"transfer", "vllm_ttft", "soak_transport", "index"} <= set(MODULES)


def test_the_transfer_bench_ends_with_the_names_that_readers_know() -> None:
    sizes = {
        name: {"added_us": 1.0, "data_share": 0.8, "checksums_ms": 2.0, "fetch_ms": 8.0}
        for name in ("1_mb", "16_mb", "256_mb")
    }
    found = {"sizes": sizes, "concurrent": {"32": {"slowest_of_median": 1.25}}}
    assert measures(found) == {
        "added_us_1mb": 1.0,
        "raw_share_16mb": 0.8,
        "raw_share_256mb": 0.8,
        "checksum_cost_256mb": 0.25,
        "fair_32": 1.25,
    }
    assert measures({}) == {}
