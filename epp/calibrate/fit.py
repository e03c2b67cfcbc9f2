"""From samples to two curves and a crossover with its interval, or to sentences why not. Pure.

Medians of each length are fitted by least squares of the relative error, so that 2K counts as much as 48K,
with coefficients that cannot be negative. The interval comes from resampling the samples of each length.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epp.core.pull_curves import PullCurve, RecomputeCurve, crossover_tokens

Samples = Mapping[int, Sequence[float]]  # ms by prefix length in tokens
RECOMPUTE, PULL = "recompute", "pull"
MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a measurement is refused."""

    min_lengths: int = 4
    min_samples: int = MIN_SAMPLES  # of one length
    max_uncertainty: float = 0.15  # of a median: twice its standard error, relative
    max_misfit: float = 0.30  # between a curve and a median, relative
    max_interval: float = 0.60  # width of the crossover's interval, relative to the crossover
    resamples: int = 400
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted. `crossover_tokens` below `shortest_tokens` is extrapolated: the pull was cheaper
    wherever it was measured."""

    recompute: RecomputeCurve
    pull: PullCurve
    crossover_tokens: float
    low_tokens: float
    high_tokens: float
    shortest_tokens: int
    longest_tokens: int

    @property
    def extrapolated(self) -> bool:
        return self.crossover_tokens < self.shortest_tokens

    def threshold_tokens(self, margin: float, block_size_tokens: int) -> int:
        """Above the crossover by `margin`, not below its interval or what was measured; whole blocks."""
        wanted = max(self.crossover_tokens * (1.0 + margin), self.high_tokens, self.shortest_tokens)
        return math.ceil(wanted / block_size_tokens) * block_size_tokens


class Refused(ValueError):
    """The samples do not carry a threshold. One sentence for each reason."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = tuple(sentences)


def calibrate(recompute: Samples, pull: Samples, limits: Limits, seed: int = 0) -> Calibration:
    """Fit both curves.

    Raises:
        Refused: too few or too noisy samples, curves of another shape, or no crossover in what was measured.
    """
    _refuse([*_sparse(recompute, pull, limits), *_noisy(recompute, pull, limits)])
    curves = _fit(recompute, pull)
    _refuse([*_misfits(curves, recompute, pull, limits)])
    lengths = sorted(recompute)
    crossover = crossover_tokens(*curves)
    _refuse(_too_late(crossover, lengths[-1]))
    low, high = _interval(recompute, pull, limits, seed)
    found = Calibration(*curves, crossover, low, high, lengths[0], lengths[-1])
    _refuse(_wide(found, limits))
    return found


def _refuse(sentences: Sequence[str]) -> None:
    if sentences:
        raise Refused(sentences)


def _sparse(recompute: Samples, pull: Samples, limits: Limits) -> list[str]:
    if set(recompute) != set(pull):
        return ["recompute and pull were not measured at the same lengths"]
    if len(recompute) < limits.min_lengths:
        return [f"{len(recompute)} lengths were measured; a curve needs at least {limits.min_lengths}"]
    return [
        f"{leg} at {tokens:,} tokens: {len(values)} valid samples; at least {limits.min_samples} are needed"
        for leg, samples in ((RECOMPUTE, recompute), (PULL, pull))
        for tokens, values in sorted(samples.items())
        if len(values) < limits.min_samples
    ]


def uncertainty(values: Sequence[float]) -> float:
    """Twice the standard error of the median, relative to it; from the median deviation, so that one
    outlier does not condemn a length."""
    median = statistics.median(values)
    deviation = statistics.median(abs(v - median) for v in values)
    return 2.0 * 1.2533 * 1.4826 * deviation / math.sqrt(len(values)) / median


def _noisy(recompute: Samples, pull: Samples, limits: Limits) -> list[str]:
    found = []
    for leg, samples in ((RECOMPUTE, recompute), (PULL, pull)):
        for tokens, values in sorted(samples.items()):
            if len(values) < limits.min_samples:
                continue
            known = uncertainty(values)
            if known > limits.max_uncertainty:
                found.append(
                    f"{leg} at {tokens:,} tokens is too noisy: {len(values)} samples between"
                    f" {min(values):.0f} and {max(values):.0f} ms give a median known to +-{known:.0%} (limit"
                    f" {limits.max_uncertainty:.0%}); measure on an idle pair or with more repetitions"
                )
    return found


def _misfits(
    curves: tuple[RecomputeCurve, PullCurve], recompute: Samples, pull: Samples, limits: Limits
) -> list[str]:
    found = []
    for leg, curve, samples in ((RECOMPUTE, curves[0], recompute), (PULL, curves[1], pull)):
        for tokens, values in sorted(samples.items()):
            median = statistics.median(values)
            misfit = abs(curve.at_ms(tokens) / median - 1.0)
            if misfit > limits.max_misfit:
                found.append(
                    f"{leg} at {tokens:,} tokens took {median:.0f} ms where the curve of the other lengths"
                    f" says {curve.at_ms(tokens):.0f} ms: something else than the length decided"
                )
    return found


def _too_late(crossover: float, longest: int) -> list[str]:
    if crossover == math.inf:
        return ["a pull was never cheaper and would not become so: leave pulls off for this pair"]
    if crossover > longest:
        return [
            f"the curves cross at {crossover:,.0f} tokens, beyond the longest length measured ({longest:,}):"
            " measure longer prefixes, or leave pulls off for this pair"
        ]
    return []


def _wide(found: Calibration, limits: Limits) -> list[str]:
    width = found.high_tokens - found.low_tokens
    if found.high_tokens <= found.shortest_tokens or width <= limits.max_interval * found.crossover_tokens:
        return []
    return [
        f"the crossover is somewhere between {found.low_tokens:,.0f} and {found.high_tokens:,.0f} tokens: too"
        " wide for a threshold; add lengths around it or repetitions"
    ]


def _interval(recompute: Samples, pull: Samples, limits: Limits, seed: int) -> tuple[float, float]:
    """Bootstrap: resample the samples of every length, fit, cross."""
    rng = random.Random(seed)
    crossings = sorted(
        crossover_tokens(*_fit(_resample(recompute, rng), _resample(pull, rng)))
        for _ in range(limits.resamples)
    )
    tail = (1.0 - limits.confidence) / 2.0
    last = len(crossings) - 1
    return crossings[math.floor(tail * last)], crossings[math.ceil((1.0 - tail) * last)]


def _resample(samples: Samples, rng: random.Random) -> Samples:
    return {tokens: rng.choices(values, k=len(values)) for tokens, values in sorted(samples.items())}


def _fit(recompute: Samples, pull: Samples) -> tuple[RecomputeCurve, PullCurve]:
    fixed, linear, square = _least_squares(recompute, (lambda n: 1.0, lambda n: n, lambda n: n * n))
    floor, slope = _least_squares(pull, (lambda n: 1.0, lambda n: n))
    return RecomputeCurve(fixed, linear * 1e3, square * 1e6), PullCurve(floor, slope * 1e3)


def _least_squares(samples: Samples, terms: Sequence[Callable[[float], float]]) -> list[float]:
    """Coefficients >= 0 that minimise the squared relative error of the medians. There are at most three, so
    every subset of them is tried."""
    medians = {tokens: statistics.median(values) for tokens, values in samples.items()}
    scale = max(medians)
    rows = [[term(tokens / scale) / ms for term in terms] for tokens, ms in medians.items()]
    best, best_error = [0.0] * len(terms), math.inf
    for count in range(1, len(terms) + 1):
        for chosen in itertools.combinations(range(len(terms)), count):
            found = _solve([[row[i] for i in chosen] for row in rows])
            if found is None or min(found) < 0.0:
                continue
            values = [0.0] * len(terms)
            for i, value in zip(chosen, found, strict=True):
                values[i] = value
            error = sum((sum(v * x for v, x in zip(values, row, strict=True)) - 1.0) ** 2 for row in rows)
            if error < best_error - 1e-12:
                best, best_error = values, error
    return [value * term(1.0 / scale) for value, term in zip(best, terms, strict=True)]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x that minimises |rows x - 1|, by the normal equations; None: not determined."""
    size = len(rows[0])
    matrix = [
        [sum(r[i] * r[j] for r in rows) for j in range(size)] + [sum(r[i] for r in rows)] for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-14:
            return None
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (matrix[i][size] - rest) / matrix[i][i]
    return found
