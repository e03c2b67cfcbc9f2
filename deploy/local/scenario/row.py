"""What a row of the scenario says, and how a verdict is reached: values only, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

AS_EXPECTED = "as expected"
UNEXPECTED = "UNEXPECTED"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table and of out/demo.json.

    `cached_tokens` is what the engine did not compute (device + restored + pulled);
    `bytes_received` and `bytes_served` are counted by the two ends of the transfers independently.
    """

    number: int
    title: str
    destination: str
    prefill: str  # endpoint that computed the prompt, if another one
    source: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    pulled_tokens: int
    bytes_received: int
    bytes_served: int
    ttft_ms: float
    expected: str
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return UNEXPECTED if self.problems else AS_EXPECTED

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Check:
    """Something the scenario shows besides the rows."""

    title: str
    expected: str
    seen: str
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return UNEXPECTED if self.problems else AS_EXPECTED

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(slots=True)
class Findings:
    """Collects what differs from the expectation, each as a sentence."""

    problems: list[str] = field(default_factory=list)

    def equal(self, what: str, seen: object, expected: object) -> None:
        if seen != expected:
            self.problems.append(f"{what} is {seen}, expected {expected}")

    def one_of(self, what: str, seen: object, allowed: Sequence[object]) -> None:
        if seen not in allowed:
            names = " or ".join(str(value) for value in allowed)
            self.problems.append(f"{what} is {seen}, expected {names}")

    def between(self, what: str, seen: float, low: float, high: float) -> None:
        if not low <= seen <= high:
            self.problems.append(f"{what} is {seen:g}, expected {low:g} to {high:g}")

    def true(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    @property
    def as_tuple(self) -> tuple[str, ...]:
        return tuple(self.problems)
