"""Curves and crossovers from synthetic samples whose truth is known, and every refusal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from epp.calibrate.fit import Limits, Refused, Samples, calibrate, uncertainty
from epp.core.pull_curves import PullCurve, RecomputeCurve, crossover_tokens

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
RECOMPUTE = RecomputeCurve(20.0, 25.0, 0.25)
PULL = PullCurve(120.0, 5.0)
LIMITS = Limits()


def samples(
    curve: RecomputeCurve | PullCurve,
    noise: float = 0.03,
    count: int = 7,
    seed: int = 1,
    lengths: tuple[int, ...] = LENGTHS,
) -> Samples:
    rng = random.Random(seed)
    return {n: [curve.at_ms(n) * rng.lognormvariate(0.0, noise) for _ in range(count)] for n in lengths}


def test_exact_samples_give_the_exact_curves() -> None:
    found = calibrate(samples(RECOMPUTE, 0.0), samples(PULL, 0.0), LIMITS)
    assert found.recompute.fixed_ms == pytest.approx(20.0)
    assert found.recompute.token_us == pytest.approx(25.0)
    assert found.recompute.token_pair_ns == pytest.approx(0.25)
    assert (found.pull.floor_ms, found.pull.token_us) == (pytest.approx(120.0), pytest.approx(5.0))
    assert found.crossover_tokens == pytest.approx(crossover_tokens(RECOMPUTE, PULL))
    assert found.low_tokens == pytest.approx(found.high_tokens)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    truth = crossover_tokens(RECOMPUTE, PULL)
    limits = replace(LIMITS, resamples=60)
    covered = 0
    for seed in range(40):
        found = calibrate(samples(RECOMPUTE, seed=seed), samples(PULL, seed=1000 + seed), limits)
        assert found.crossover_tokens == pytest.approx(truth, rel=0.15)
        covered += found.low_tokens <= truth <= found.high_tokens
    assert covered >= 33  # 95 % said; a bootstrap of seven medians is a little narrow


def test_one_outlier_in_seven_changes_little() -> None:
    clean, odd = samples(PULL), samples(PULL)
    odd[4096][0] *= 20.0  # type: ignore[index]
    there, here = (calibrate(samples(RECOMPUTE), pull, LIMITS) for pull in (clean, odd))
    assert here.crossover_tokens == pytest.approx(there.crossover_tokens, rel=0.05)


def test_a_noisy_length_is_refused_by_name() -> None:
    pull = dict(samples(PULL))
    pull[8192] = [100.0, 180.0, 260.0, 340.0, 420.0]
    with pytest.raises(Refused) as refused:
        calibrate(samples(RECOMPUTE), pull, LIMITS)
    (sentence,) = refused.value.sentences
    assert sentence.startswith("pull at 8,192 tokens is too noisy: 5 samples between 100 and 420 ms")
    assert uncertainty(pull[8192]) > LIMITS.max_uncertainty > uncertainty(pull[4096])


def test_a_length_that_follows_no_curve_is_refused_by_name() -> None:
    pull = dict(samples(PULL))
    pull[4096] = [3.0 * ms for ms in pull[4096]]
    with pytest.raises(Refused, match=r"pull at 4,096 tokens took \d+ ms where the curve"):
        calibrate(samples(RECOMPUTE), pull, LIMITS)


def test_too_few_lengths_or_samples_are_refused() -> None:
    few = {n: values for n, values in samples(PULL).items() if n < 8192}
    with pytest.raises(Refused, match="3 lengths"):
        calibrate({n: v for n, v in samples(RECOMPUTE).items() if n < 8192}, few, LIMITS)
    with pytest.raises(Refused, match="same lengths"):
        calibrate(samples(RECOMPUTE), few, LIMITS)
    pull = dict(samples(PULL))
    pull[2048] = pull[2048][:2]
    with pytest.raises(Refused, match="pull at 2,048 tokens: 2 valid samples"):
        calibrate(samples(RECOMPUTE), pull, LIMITS)


def test_a_pull_that_is_never_cheaper_is_refused() -> None:
    with pytest.raises(Refused, match="leave pulls off"):
        calibrate(samples(RecomputeCurve(10.0, 5.0)), samples(PullCurve(100.0, 20.0)), LIMITS)


def test_a_crossover_beyond_what_was_measured_is_refused() -> None:
    with pytest.raises(Refused, match="beyond the longest length measured"):
        calibrate(samples(RECOMPUTE), samples(PullCurve(2_000.0, 5.0)), LIMITS)


def test_an_uncertain_crossover_is_refused() -> None:
    """The curves run side by side: each is well known, where they cross is not."""
    recompute, pull = samples(RecomputeCurve(100.0, 10.0), 0.05), samples(PullCurve(112.0, 8.0), 0.05)
    with pytest.raises(Refused, match="too wide for a threshold"):
        calibrate(recompute, pull, LIMITS)


def test_where_the_pull_always_won_the_threshold_is_the_shortest_length_measured() -> None:
    found = calibrate(samples(RECOMPUTE), samples(PullCurve(10.0, 1.0)), LIMITS)
    assert found.extrapolated
    assert found.threshold_tokens(0.25, 16) == 1024


def test_threshold_is_above_the_crossover_and_its_interval_in_whole_blocks() -> None:
    found = calibrate(samples(RECOMPUTE), samples(PULL), LIMITS)
    tokens = found.threshold_tokens(0.25, 16)
    assert tokens % 16 == 0
    assert found.crossover_tokens * 1.25 <= tokens < found.crossover_tokens * 1.25 + 16
    assert found.threshold_tokens(0.0, 16) >= found.high_tokens


def test_published_figures_of_gpt_oss() -> None:
    """Medians of the published table: the pull wins at every length."""
    published = {2048: (78, 35), 8192: (250, 57), 16_384: (510, 86), 32_768: (1173, 165), 49_152: (1988, 235)}
    found = calibrate(
        {n: [float(ms)] * 3 for n, (ms, _) in published.items()},
        {n: [float(ms)] * 3 for n, (_, ms) in published.items()},
        LIMITS,
    )
    assert found.extrapolated
    for tokens, (recompute_ms, pull_ms) in published.items():
        assert found.recompute.at_ms(tokens) == pytest.approx(recompute_ms, rel=0.06)
        assert found.pull.at_ms(tokens) == pytest.approx(pull_ms, rel=0.1)
