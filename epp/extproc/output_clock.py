"""When the pieces of one answer's output passed. Plain arithmetic; the clock is the caller's."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from epp.core.types import GAP_BOUNDS_S, Outcome, OutputTiming


class OutputClock:
    """Of one stream. `note` costs under a microsecond: it runs for every piece of every answer."""

    __slots__ = ("_first_s", "_gaps", "_last_s")

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps: list[int] | None = None

    def note(self, now_s: float) -> None:
        """Output passed at `now_s`."""
        if self._first_s is None:
            self._first_s = now_s
        else:
            if self._gaps is None:
                self._gaps = [0] * (len(GAP_BOUNDS_S) + 1)
            self._gaps[bisect_left(GAP_BOUNDS_S, now_s - self._last_s)] += 1
        self._last_s = now_s

    def timed(self, outcome: Outcome, started_s: float) -> Outcome:
        """`outcome` with the times of a request that began at `started_s`."""
        if self._first_s is None:
            return outcome
        timing = None
        if self._gaps is not None:
            timing = OutputTiming(self._last_s - self._first_s, tuple(self._gaps))
        return replace(outcome, ttft_s=self._first_s - started_s, output=timing)
