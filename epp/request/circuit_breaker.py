"""When to stop asking a back end that keeps failing, and when to try it again. Pure: time is an argument.

Cases of `admits`: closed -> yes; open and its pause is not over -> no; pause over -> yes, once, for a
probe; the probe's outcome closes it, or opens it again for twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAILURES_TO_OPEN: Final = 3  # in a row
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0


@dataclass(slots=True)
class CircuitBreaker:
    """State of one back end. A call that never reports back counts as a probe for one pause only."""

    failures: int = 0
    _pause_s: float = FIRST_PAUSE_S
    _open_until_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def admits(self, now_s: float) -> bool:
        """True: make the call and report its outcome. An open breaker lets one probe through a pause."""
        if self._open_until_s is None:
            return True
        if now_s < self._open_until_s:
            return False
        self._open_until_s = now_s + self._pause_s  # others wait for the probe
        return True

    def succeeded(self) -> None:
        self.failures, self._pause_s, self._open_until_s = 0, FIRST_PAUSE_S, None

    def failed(self, now_s: float) -> None:
        """One more failure in a row."""
        self.failures += 1
        if self._open_until_s is not None:  # a probe
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._open_until_s = now_s + self._pause_s
        elif self.failures >= FAILURES_TO_OPEN:
            self._open_until_s = now_s + self._pause_s
