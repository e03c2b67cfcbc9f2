"""A histogram without locks, for figures that one thread counts: a hundred of them a request are cheap."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class PlainHistogram:
    """Counts by upper bound. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Many observations, counted by the same bounds; `total` is their sum."""
        for number, count in enumerate(counts):
            self._counts[number] += count
        self._sum += total

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> PlainHistogram:
        """What somebody else has counted."""
        histogram = cls(bounds)
        histogram.add(counts, total)
        return histogram

    def show(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """One label set of `family`; nothing where nothing was observed."""
        if not any(self._counts):
            return
        buckets, reached = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            reached += count
            buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(reached)))
        family.add_metric(labels, buckets, self._sum)
