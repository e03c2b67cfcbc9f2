"""What the director asks before it schedules: may this request go on now?

`FlowController` lets it wait; `Shedding` (the feature gate is off) refuses sheddable requests when the pool
is saturated; `Open` asks nothing. They raise with the status that the client is to see.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from epp.core.errors import Saturated

# (now_s, requests let through that are not booked yet) -> 1.0 and above: full; None: there is no endpoint
PoolSaturation = Callable[[float, int], float | None]


@dataclass(frozen=True, slots=True)
class Asking:
    """What is known of a request before it is scheduled."""

    priority: int = 0
    flow: str = ""
    size_bytes: int = 0
    slo_ttft_s: float | None = None  # the first token is promised within


class Admission(Protocol):
    """One a picker."""

    def admitted(self, asking: Asking) -> AbstractAsyncContextManager[None]:
        """Inside, the request may be scheduled; leave it when its load is booked (or it failed).

        Raises:
            PickerError: it may not; nothing is held.
        """

    def enters_at_once(self, asking: Asking) -> bool:
        """Whether it may be scheduled in this very step, so that its load is booked before anybody else asks.
        Counted as let through when it may.

        Raises:
            PickerError: it may not, and need not wait.
        """

    def wake(self) -> None:
        """There may be room now: load has gone, metrics or endpoints have come. Cheap; never blocks."""

    def note_served(self, asking: Asking, tokens: float) -> None:
        """The request of `asking` has cost so many tokens."""


class Open:
    """No detector is configured: everybody may go on."""

    def enters_at_once(self, asking: Asking) -> bool:
        return True

    @asynccontextmanager
    async def admitted(self, asking: Asking) -> AsyncIterator[None]:
        yield

    def wake(self) -> None:
        """Nobody waits."""

    def note_served(self, asking: Asking, tokens: float) -> None:
        """Nobody is compared."""


class Shedding:
    """The feature gate is off: nobody waits, and what is below the default priority goes first."""

    def __init__(self, saturation: PoolSaturation, clock: Callable[[], float]) -> None:
        self._saturation = saturation
        self._clock = clock
        self.shed = 0

    def enters_at_once(self, asking: Asking) -> bool:
        if asking.priority < 0:
            saturation = self._saturation(self._clock(), 0)
            if saturation is not None and saturation >= 1.0:
                self.shed += 1
                raise Saturated(f"the pool is saturated, and priority {asking.priority} may be shed")
        return True

    @asynccontextmanager
    async def admitted(self, asking: Asking) -> AsyncIterator[None]:
        self.enters_at_once(asking)
        yield

    def wake(self) -> None:
        """Nobody waits."""

    def note_served(self, asking: Asking, tokens: float) -> None:
        """Nobody is compared."""
