"""How long to wait after a failure: exponential with jitter, so that clients do not come back all at once."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffRule:
    """Bounds of the pause, before jitter of a half to one and a half."""

    first_s: float = 0.8
    most_s: float = 30.0
    longest_asked_s: float = 120.0  # of a server's Retry-After


class Backoff:
    """Counts failures in a row."""

    def __init__(self, rule: BackoffRule, rng: random.Random) -> None:
        self._rule = rule
        self._rng = rng
        self.failures = 0

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, *, asked_s: float = 0.0, at_once: bool = False) -> float:
        """Seconds to wait after one more failure. `at_once`: not at all, if it is the first in a row."""
        self.failures += 1
        if at_once and self.failures == 1:
            return 0.0
        doubled = min(self._rule.most_s, self._rule.first_s * 2.0 ** min(self.failures - 1, 16))
        return max(doubled * self._rng.uniform(0.5, 1.5), min(asked_s, self._rule.longest_asked_s))
