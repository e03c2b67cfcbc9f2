"""A cost that grows with a size, learned from what was seen of late. Pure; `now_s` is an argument.

Robust on purpose: medians, no matrix. Sizes that spread give floor and slope (Theil-Sen); sizes that do not
give only one of them: of a pull the slope, as on a slower link; of computing the floor, as behind a slower
gateway, so that what every request pays is never taken for the price of a token.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass

MAX_SAMPLES = 16
MAX_AGE_S = 600.0  # then a pair is as unknown as before, and is tried again
_SPREAD = 2.0  # largest over smallest size from where on two parameters are fitted
_FIT_SAMPLES = 4
_REACH = 4.0  # sizes so far beyond those seen are not predicted with certainty
MAX_ERROR = 0.2  # standard error of the logarithm of seen over predicted


@dataclass(frozen=True, slots=True)
class Line:
    """`floor_ms + slope * size`."""

    floor_ms: float
    slope: float

    def at_ms(self, size: float) -> float:
        return self.floor_ms + self.slope * size


@dataclass(frozen=True, slots=True)
class Estimate:
    """The line in force, and how well it is known. `in_reach`: it was learned near the size asked for, or
    there is a prior. `error`: standard error of the logarithm of what it says; 0 of a prior alone."""

    line: Line
    in_reach: bool = True
    error: float = 0.0

    @property
    def sure(self) -> bool:
        """Whether it may speak for itself, whatever it is compared with."""
        return self.in_reach and self.error <= MAX_ERROR


class LearnedLine:
    """The last `MAX_SAMPLES` observations of one thing."""

    __slots__ = ("_error", "_fit", "_fitted_for", "_keeps_slope", "_samples")

    def __init__(self, *, keeps_slope: bool = False) -> None:
        """`keeps_slope`: where sizes do not spread, the prior's slope is kept and the floor is learned."""
        self._keeps_slope = keeps_slope
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MAX_SAMPLES)
        self._fit: Line | None = None
        self._fitted_for: Line | None = None  # the prior that `_fit` was made with
        self._error = 0.0

    def add(self, size: float, ms: float, now_s: float) -> None:
        """`size` above 0."""
        self._samples.append((now_s, size, ms))
        self._fit = None

    def estimate(self, size: float, prior: Line | None, now_s: float) -> Estimate | None:
        """What is known of `size`; None: nothing is, and there is no prior."""
        while self._samples and self._samples[0][0] < now_s - MAX_AGE_S:
            self._samples.popleft()
            self._fit = None
        if not self._samples:
            return None if prior is None else Estimate(prior)
        if self._fit is None or self._fitted_for != prior:
            self._fit, self._fitted_for = (
                _fitted([s[1:] for s in self._samples], prior, self._keeps_slope),
                prior,
            )
            self._error = self._error_of(self._fit)
        return Estimate(self._fit, self._in_reach(size, prior), self._error)

    def _in_reach(self, size: float, prior: Line | None) -> bool:
        if prior is not None:
            return True
        sizes = [s[1] for s in self._samples]
        return len(sizes) >= _FIT_SAMPLES and min(sizes) / _REACH <= size <= max(sizes) * _REACH

    def _error_of(self, line: Line) -> float:
        """How well the samples tell where the line is, by their median deviation."""
        off = [abs(math.log(max(ms, 1e-3) / max(line.at_ms(size), 1e-3))) for _, size, ms in self._samples]
        return 1.4826 * statistics.median(off) / math.sqrt(len(off))


def _fitted(samples: list[tuple[float, float]], prior: Line | None, keeps_slope: bool) -> Line:
    sizes = [size for size, _ in samples]
    if len(samples) >= _FIT_SAMPLES and max(sizes) >= _SPREAD * min(sizes):
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0])
            for a, b in itertools.combinations(samples, 2)
            if abs(b[0] - a[0]) > 0.2 * max(a[0], b[0])
        ]
        slope = max(0.0, statistics.median(slopes))
        return Line(max(0.0, statistics.median(ms - slope * size for size, ms in samples)), slope)
    if keeps_slope and prior is not None:
        floor_ms = statistics.median(ms - prior.slope * size for size, ms in samples)
        return Line(max(0.0, floor_ms), prior.slope)
    floor_ms = prior.floor_ms if prior is not None else 0.0
    slope = statistics.median((ms - floor_ms) / size for size, ms in samples)
    if slope >= 0.0:
        return Line(floor_ms, slope)
    return Line(max(0.0, statistics.median(ms for _, ms in samples)), 0.0)  # faster than the prior's floor
