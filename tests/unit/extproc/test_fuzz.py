"""Short form of `benchmarks.fuzz_extproc`: mutated conversations leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from benchmarks.fuzz_extproc import Harness, fuzz


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Broken gateways and faults of the handler are logged, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [0, 7_000_000])
async def test_mutated_conversations_leave_nothing_behind(seed: int) -> None:
    found = await fuzz(seed, 1_000)
    assert found["sequences"] == 1_000
    assert found["finished"] > 150  # most conversations still are some
    assert found["refused_by_protocol"] > 50


@pytest.mark.parametrize("seed", [86_172, 86_574])
async def test_a_decision_made_as_its_client_left_is_finished_when_the_stream_is(seed: int) -> None:
    """It was finished a turn of the loop later, behind `settle`'s back."""
    harness = Harness()
    await harness.run(seed)
    harness.check()
