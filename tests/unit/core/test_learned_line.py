"""A line learned from few, noisy and changing observations."""

from __future__ import annotations

import random

import pytest

from epp.core.learned_line import MAX_AGE_S, MAX_SAMPLES, LearnedLine, Line

PRIOR = Line(30.0, 0.01)
TRUTH = Line(100.0, 0.5)


def learned(*sizes: float, truth: Line = TRUTH, noise: float = 0.0) -> LearnedLine:
    line, rng = LearnedLine(), random.Random(1)
    for size in sizes:
        line.add(size, truth.at_ms(size) * rng.lognormvariate(0.0, noise), 0.0)
    return line


def test_nothing_seen_is_the_prior_or_nothing() -> None:
    assert LearnedLine().estimate(100.0, None, 0.0) is None
    estimate = LearnedLine().estimate(100.0, PRIOR, 0.0)
    assert estimate is not None
    assert (estimate.line, estimate.sure) == (PRIOR, True)


def test_one_observation_moves_the_slope_and_keeps_the_floor() -> None:
    estimate = learned(1000.0).estimate(2000.0, PRIOR, 0.0)
    assert estimate is not None
    assert estimate.line == Line(30.0, pytest.approx(0.57))  # type: ignore[arg-type]
    faster = learned(1000.0, truth=Line(10.0, 0.0)).estimate(1000.0, PRIOR, 0.0)
    assert faster is not None
    assert faster.line == Line(10.0, 0.0)


@pytest.mark.parametrize("prior", [None, PRIOR])
def test_spread_sizes_give_floor_and_slope(prior: Line | None) -> None:
    estimate = learned(500.0, 1000.0, 2000.0, 4000.0, 8000.0).estimate(4000.0, prior, 0.0)
    assert estimate is not None
    assert (estimate.line.floor_ms, estimate.line.slope) == (pytest.approx(100.0), pytest.approx(0.5))
    assert estimate.sure


def test_outliers_change_little() -> None:
    line = learned(*(500.0 * n for n in range(1, 13)), noise=0.05)
    line.add(2000.0, 60_000.0, 0.0)
    estimate = line.estimate(4000.0, None, 0.0)
    assert estimate is not None
    assert estimate.line.at_ms(4000.0) == pytest.approx(TRUTH.at_ms(4000.0), rel=0.1)
    assert estimate.sure


def test_observations_that_disagree_are_not_sure() -> None:
    line, rng = LearnedLine(), random.Random(2)
    for number in range(12):
        line.add(1000.0 + number, rng.choice((10.0, 400.0, 3000.0)), 0.0)
    estimate = line.estimate(1000.0, PRIOR, 0.0)
    assert estimate is not None
    assert not estimate.sure


def test_without_a_prior_few_or_far_observations_are_not_sure() -> None:
    few = learned(1000.0, 2000.0, 3000.0).estimate(2000.0, None, 0.0)
    assert few is not None
    assert not few.sure
    line = learned(1000.0, 2000.0, 3000.0, 4000.0)
    assert [line.estimate(size, None, 0.0).sure for size in (100.0, 300.0, 15_000.0, 20_000.0)] == [  # type: ignore[union-attr]
        False,
        True,
        True,
        False,
    ]


def test_a_change_is_followed_and_the_old_is_forgotten() -> None:
    line = learned(*[1000.0] * MAX_SAMPLES)
    for _ in range(MAX_SAMPLES // 2 + 1):
        line.add(1000.0, 50.0, 10.0)
    estimate = line.estimate(1000.0, PRIOR, 10.0)
    assert estimate is not None
    assert estimate.line.at_ms(1000.0) == pytest.approx(50.0)
    late = line.estimate(1000.0, PRIOR, 10.1 + MAX_AGE_S)
    assert late is not None
    assert late.line == PRIOR
