"""A benchmark that nobody ran for months still fits the code it measures: each can be imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"timed_tier", "index_peer"}  # run inside vLLM, and beside Dynamo
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ELSEWHERE)


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_they_are_all_found() -> None:
    assert {"transfer", "vllm_ttft", "soak_transport", "index"} <= set(MODULES)
