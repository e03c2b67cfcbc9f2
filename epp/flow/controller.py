"""Requests wait here until the pool has room, by priority and fairness, each within its time.

A request that is let through is not on the picker's books yet (its prompt has to be tokenised first), so
those in between are counted and told to the saturation detector: a burst cannot slip through the gap.
Whatever may have made room calls `wake`; a tick while somebody waits covers what nobody tells (metrics
that grow stale) and expires. Nothing is lost: every request ends in room, a refusal, its time, or its
client's going away.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from epp.core.errors import NoEndpoints, PickerError, Saturated, WaitedTooLong
from epp.core.flow.bands import FlowSettings, Ticket
from epp.core.flow.queue import FlowQueue, Refusal
from epp.core.flow.usage_limits import ActivePriorities
from epp.flow.admission import Asking, PoolSaturation

TICK_S: Final = 0.02


@dataclass(slots=True)
class FlowCounters:
    """For metrics. Outcomes by (outcome, priority); `saturation` as last seen, None: no endpoint."""

    outcomes: Counter[tuple[str, int]] = field(default_factory=Counter)
    saturation: float | None = 0.0


class FlowController:
    """Component: `run` until cancelled. Used from one loop."""

    def __init__(
        self,
        settings: FlowSettings,
        saturation: PoolSaturation,
        *,
        on_wait: Callable[[Asking, str, float], None] = lambda asking, outcome, waited_s: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_wait` is told of every request: outcome and seconds that it waited."""
        self.queue = FlowQueue(settings)
        self.counters = FlowCounters()
        self._saturation = saturation
        self._on_wait = on_wait
        self._clock = clock
        self._pause = pause
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._occupied = asyncio.Event()
        self._active = ActivePriorities(frozenset(settings.bands))
        self._turn = 0
        self._number = 0
        self._unbooked = 0

    @property
    def unbooked(self) -> int:
        """Let through and not booked yet; zero when nothing is in flight."""
        return self._unbooked

    @asynccontextmanager
    async def admitted(self, asking: Asking) -> AsyncIterator[None]:
        """As `Admission.admitted`.

        Raises:
            Saturated: a bound of the queue is reached.
            WaitedTooLong: its time is over.
            NoEndpoints: its time is over, and the pool is empty.
        """
        started_s = self._clock()
        try:
            await self._room(asking, started_s)
        except PickerError as error:
            self._ended(asking, error.reason, started_s)
            raise
        except asyncio.CancelledError:
            self._ended(asking, "cancelled", started_s)
            raise
        self._ended(asking, "dispatched", started_s)
        try:
            yield
        finally:
            self._unbooked -= 1
            self.wake()

    def enters_at_once(self, asking: Asking) -> bool:
        """As `Admission.enters_at_once`."""
        now_s = self._clock()
        if len(self.queue) or not self._has_room(asking.priority, now_s):
            return False
        self._ended(asking, "dispatched", now_s)
        return True

    def wake(self) -> None:
        """Let through whom there is room for, and end whose time is over."""
        if not len(self.queue):
            return
        now_s = self._clock()
        for late in self.queue.expire(now_s):
            self._end(late.id, self._too_late(now_s))
        while (taken := self.queue.take(now_s, self._admitting(now_s))) is not None:
            self._let_through(taken.id)
        if not len(self.queue):
            self._occupied.clear()

    def note_served(self, asking: Asking, tokens: float) -> None:
        self.queue.note_served(asking.priority, asking.flow, tokens, self._clock())

    async def run(self) -> None:
        while True:
            await self._occupied.wait()
            self.wake()
            await self._pause(TICK_S)

    # --- inside ---------------------------------------------------------------------------------
    async def _room(self, asking: Asking, now_s: float) -> None:
        if not len(self.queue) and self._has_room(asking.priority, now_s):
            self._unbooked += 1
            return
        ticket = self._ticket(asking, now_s)
        refusal = self.queue.offer(ticket)
        if refusal is not None:
            raise Saturated(_why(refusal))
        future = self._waiting[ticket.id] = asyncio.get_running_loop().create_future()
        self._occupied.set()
        self.wake()  # the bands may have let it in before others
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._unbooked -= 1  # let through in the moment it went away
                self.wake()
            raise
        finally:
            self._waiting.pop(ticket.id, None)
            self.queue.cancel(ticket.id)

    def _ticket(self, asking: Asking, now_s: float) -> Ticket:
        settings = self.queue.settings
        is_empty = self._saturation(now_s, self._unbooked) is None
        ttl_s = settings.no_endpoint_ttl_s if is_empty else settings.longest_wait_s(asking.priority)
        self._number += 1
        return Ticket(
            str(self._number),
            now_s,
            asking.priority,
            asking.flow,
            asking.size_bytes,
            None if ttl_s is None else now_s + ttl_s,
            None if asking.slo_ttft_s is None else now_s + asking.slo_ttft_s,
        )

    def _has_room(self, priority: int, now_s: float) -> bool:
        self._active.note(priority, now_s)
        return self._admitting(now_s)(priority)

    def _admitting(self, now_s: float) -> Callable[[int], bool]:
        """Which priorities there is room for now. Everybody who waits has been noted as active."""
        level = self._saturation(now_s, self._unbooked)
        self.counters.saturation = level
        limit = self.queue.settings.usage_limit
        if level is None or limit is None:
            has_room = level is not None and level < 1.0
            return lambda _priority: has_room
        saturation, priorities = level, self._active.descending(now_s)
        self._turn += 1
        ceilings = dict(zip(priorities, limit.ceilings(saturation, priorities, self._turn), strict=True))
        return lambda priority: saturation < ceilings.get(priority, 1.0)

    def _too_late(self, now_s: float) -> PickerError:
        if self._saturation(now_s, self._unbooked) is None:
            return NoEndpoints("no endpoint came while the request waited")
        return WaitedTooLong("the pool had no room while the request waited")

    def _let_through(self, ticket_id: str) -> None:
        future = self._waiting.get(ticket_id)
        if future is not None and not future.done():
            self._unbooked += 1
            future.set_result(None)

    def _end(self, ticket_id: str, error: PickerError) -> None:
        future = self._waiting.get(ticket_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def _ended(self, asking: Asking, outcome: str, started_s: float) -> None:
        self.counters.outcomes[outcome, asking.priority] += 1
        self._on_wait(asking, outcome, self._clock() - started_s)


def _why(refusal: Refusal) -> str:
    return {
        Refusal.TOTAL_REQUESTS: "as many requests wait as may (flowControl.maxRequests)",
        Refusal.TOTAL_BYTES: "as many bytes wait as may (flowControl.maxBytes)",
        Refusal.BAND_REQUESTS: "as many requests of this priority wait as may (maxRequests of its band)",
        Refusal.BAND_BYTES: "as many bytes of this priority wait as may (maxBytes of its band)",
    }[refusal]
