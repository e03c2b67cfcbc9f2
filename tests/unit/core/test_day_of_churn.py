"""Short form of `benchmarks.churn`: pods that come and go for hours leave memory as it was."""

from __future__ import annotations

import logging

import pytest

from benchmarks.churn import run


def test_hours_of_churn_leave_memory_flat(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # records of refusals would be kept by the test itself
    early, late = run(hours=4.0)
    assert late.objects < early.objects * 1.05
    assert late.page_bytes < early.page_bytes * 1.1
