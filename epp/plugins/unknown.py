"""The one rule for inputs that are not known: never scraped, stale, NaN, absent, no cache claim.

Unknown is neither idle nor full, neither warm nor cold. An unknown input takes the mean of those that are
known. Where nobody's is known it says nothing: a scorer gives everybody 0.5, a filter passes
everybody, and a saturation detector does what its `whenUnknown` says. Every plugin that reads something
that can be unknown gets it from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NEUTRAL = 0.5


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """None: nothing is known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def fill_unknown(scores: Sequence[float | None]) -> Sequence[float]:
    """Replace None by the mean of the known scores (NEUTRAL where there is none)."""
    if None not in scores:
        return scores  # type: ignore[return-value]  # no None in it
    mean = mean_of_known(scores)
    neutral = NEUTRAL if mean is None else mean
    return [neutral if score is None else score for score in scores]
