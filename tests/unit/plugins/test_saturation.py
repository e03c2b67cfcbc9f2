"""Saturation detectors: one number for the pool, and as filters single endpoints."""

from __future__ import annotations

import pytest

from epp.plugins.saturation import ConcurrencyDetector, UtilizationDetector
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, loaded, pods


def test_the_fuller_of_queue_and_cache_counts_and_the_pool_is_the_mean() -> None:
    rows = [
        candidate("a", waiting=5, usage=0.0),
        candidate("b", waiting=0, usage=0.4),
        candidate("c", waiting=0, usage=0.0),
    ]
    assert UtilizationDetector("d").saturation(rows, 0.1) == pytest.approx((1.0 + 0.5 + 0.0) / 3)


def test_stale_metrics_take_the_mean_of_the_fresh_ones() -> None:
    """S-D09: an outage of one endpoint's metrics neither fills the pool nor empties it."""
    detector = UtilizationDetector("d", staleness_s=0.2)
    fresh, unknown = candidate("a", waiting=10, usage=0.0), candidate("b", waiting=None, usage=None)
    assert detector.saturation([fresh, unknown], 0.1) == 2.0


@pytest.mark.parametrize(("open_", "level"), [(True, 0.0), (False, 1.0)])
def test_a_whole_outage_follows_the_setting(open_: bool, level: float) -> None:
    """S-D09."""
    detector = UtilizationDetector("d", open_when_unknown=open_)
    rows = [candidate("a", waiting=100), candidate("b", waiting=0)]
    assert detector.saturation(rows, 10.0) == level  # scraped 10 s ago
    assert detector.saturation(rows, 0.1) > 1.0  # back without a restart


def test_an_empty_pool_is_full() -> None:
    assert UtilizationDetector("d").saturation([], 0.0) == 1.0
    assert ConcurrencyDetector("d").saturation([], 0.0) == 1.0


def test_as_a_filter_it_drops_the_full_ones() -> None:
    rows = [candidate("a", waiting=5), candidate("b", waiting=4), candidate("c", usage=0.9)]
    assert pods(UtilizationDetector("d").filter(asked(), rows)) == ["b"]
    assert pods(UtilizationDetector("d", headroom=0.5).filter(asked(), rows)) == ["a", "b", "c"]
    assert len(UtilizationDetector("d").filter(asked(), rows[:1])) == 1  # nobody would be left


@pytest.mark.parametrize(
    ("mode", "level"), [("requests", 3 / 8), ("tokens", 300 / 400), ("hybrid", 300 / 400)]
)
def test_concurrency_is_what_is_in_flight_over_what_may_be(mode: str, level: float) -> None:
    rows = [loaded("a", requests=1, tokens=300), loaded("b", requests=2)]
    detector = ConcurrencyDetector("d", mode, max_requests=4, max_tokens=200)
    assert detector.saturation(rows, 0.0) == pytest.approx(level)


def test_concurrency_as_a_filter() -> None:
    rows = [loaded("a", requests=4), loaded("b", requests=3)]
    assert pods(ConcurrencyDetector("d", max_requests=4).filter(asked(), rows)) == ["b"]
    assert pods(ConcurrencyDetector("d", max_requests=4, headroom=0.5).filter(asked(), rows)) == ["a", "b"]
