"""Two curves over the length of a prefix, and where they cross. Pure.
Sizing expects them, calibration measures them, cost mode starts from them.

Recomputing a prefix costs `fixed + linear * n + quadratic * n^2`; pulling it costs `floor + slope * n`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecomputeCurve:
    """Milliseconds to compute a prefix of n tokens on an idle engine."""

    fixed_ms: float
    token_us: float
    token_pair_ns: float = 0.0  # of n squared

    def at_ms(self, tokens: float) -> float:
        return self.fixed_ms + self.token_us * 1e-3 * tokens + self.token_pair_ns * 1e-6 * tokens * tokens


@dataclass(frozen=True, slots=True)
class PullCurve:
    """Milliseconds to pull a prefix of n tokens from an idle peer over a warm session. The first pull of
    a pair costs `cold_ms` more. `bytes_per_token`: of the model it was measured with; 0: not known."""

    floor_ms: float
    token_us: float
    bytes_per_token: float = 0.0
    cold_ms: float = 0.0

    def at_ms(self, tokens: float) -> float:
        return self.floor_ms + self.token_us * 1e-3 * tokens


def crossover_tokens(recompute: RecomputeCurve, pull: PullCurve) -> float:
    """From which length on a pull is cheaper. 0: always; inf: never. The difference of the curves is convex,
    so past its larger root a pull stays cheaper."""
    a = recompute.token_pair_ns * 1e-6
    b = (recompute.token_us - pull.token_us) * 1e-3
    c = recompute.fixed_ms - pull.floor_ms
    if a <= 0.0:
        if b <= 0.0:
            return 0.0 if b == 0.0 and c > 0.0 else math.inf
        return max(0.0, -c / b)
    inside = b * b - 4.0 * a * c
    if inside < 0.0:
        return 0.0
    return max(0.0, (-b + math.sqrt(inside)) / (2.0 * a))


@dataclass(frozen=True, slots=True)
class PullPrediction:
    """What one pull would cost beside computing the same tokens, as it was known when it was decided.

    Only what differs between the two choices counts: the step that makes the first token is in neither.
    `hidden_ms`: the part of the pull during which the computing engine is busy with others anyway.
    """

    gain_tokens: int
    pull_ms: float
    recompute_ms: float
    margin_ms: float = 0.0
    hidden_ms: float = 0.0
    cold_ms: float = 0.0  # part of `pull_ms`: the pair has no session yet
    sure: bool = False  # False: the threshold decides

    @property
    def cheaper(self) -> bool:
        """Whether the pull is."""
        return max(0.0, self.pull_ms - self.hidden_ms) + self.margin_ms < self.recompute_ms
