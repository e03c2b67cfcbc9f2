"""What all streams of a service share: who decides (injected), limits, counters, decisions under way.

A decision that was made is finished exactly once, one that nobody awaits any more is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from epp.core.errors import PickerError
from epp.core.types import Outcome
from epp.extproc import events as ev

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """Who decides. All three run on the loop; the last two must not block and are never awaited."""

    def decide(self, head: ev.RequestHead, body: bytes | None) -> ev.Routing | Awaitable[ev.Routing]:
        """Route one request: at once, or, where something has to be waited for, by an awaitable that is
        cancelled when the client goes away and must then book nothing.

        Raises:
            PickerError: the client gets its status, reason and message.
        """

    def first_token(self, token: object) -> None:
        """`token` of a decision: the first output passed. At most once, before `finished`."""

    def finished(self, token: object, outcome: Outcome) -> None:
        """`token` of a decision: its stream is over. Exactly once for every `Routing` returned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one stream, and what of it counts."""

    max_body_bytes: int = 32 * 2**20  # held in memory until the decision; above it: 413
    decision_timeout_s: float = 120.0  # backstop; queues in the handler have their own, shorter ones
    idle_timeout_s: float = 3600.0  # no message at all: longer than any answer may think
    write_timeout_s: float = 60.0  # a gateway that does not take what it asked for
    heeds_subset: bool = True  # False: the gateway's endpoint subset is not looked at
    needs_bodies: bool = False  # True: a gateway that sends no bodies is refused, not served by load


# upper bounds of how long a stream lasted: a request is anything from milliseconds to minutes
STREAM_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True)
class ServiceStats:
    """Counters for telemetry. `*_open` return to zero when nothing is in flight."""

    streams: int = 0
    streams_open: int = 0
    decisions: int = 0
    decisions_open: int = 0
    deciding: int = 0  # decide() is running, cancelled ones that have not ended yet included
    protocol_errors: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # streams by gRPC status
    lasted: list[int] = field(default_factory=lambda: [0] * (len(STREAM_BOUNDS_S) + 1))  # by bound
    lasted_s: float = 0.0  # all of them together
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    degraded: Counter[ev.Degradation] = field(default_factory=Counter)

    def note_end(self, code: str, seconds: float) -> None:
        """Mutates: a stream ended with a gRPC status after so long."""
        self.ended[code] += 1
        self.lasted[bisect_left(STREAM_BOUNDS_S, seconds)] += 1
        self.lasted_s += seconds


class Conversations:
    """One instance for every stream of a server."""

    def __init__(
        self,
        handler: RequestHandler,
        limits: Limits = Limits(),
        *,
        clock: Callable[[], float] = time.monotonic,
        new_request_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.new_request_id = new_request_id
        self.stats = ServiceStats()
        self._deciding: set[asyncio.Task[ev.Routing]] = set()

    async def settle(self, timeout_s: float) -> None:
        """Wait, bounded, until decisions that were cancelled have ended."""
        if self._deciding:
            await asyncio.wait(self._deciding, timeout=timeout_s)

    def start_decision(self, awaited: Awaitable[ev.Routing]) -> asyncio.Task[ev.Routing]:
        task = asyncio.create_task(_awaiting(awaited), name="extproc-decide")
        self._deciding.add(task)
        self.stats.deciding += 1
        task.add_done_callback(self._decision_ended)
        return task

    def _decision_ended(self, task: asyncio.Task[ev.Routing]) -> None:
        self._deciding.discard(task)
        self.stats.deciding -= 1

    def abandon(self, task: asyncio.Task[ev.Routing]) -> None:
        """Nobody waits for this decision any more. What it booked all the same is finished: at once where it
        has been made, so that nothing stays booked for a turn of the loop that `settle` does not wait for."""
        if task.done():
            self._abandoned_ended(task)
            return
        task.cancel()
        task.add_done_callback(self._abandoned_ended)

    def _abandoned_ended(self, task: asyncio.Task[ev.Routing]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.finish(task.result().token, Outcome())
        elif not isinstance(error, PickerError):
            log.error("deciding failed after its stream had ended", exc_info=error)

    def finish(self, token: object, outcome: Outcome) -> None:
        try:
            self.handler.finished(token, outcome)
        except Exception:
            log.exception("finished() of the request handler failed")

    def note_degraded(self, kind: ev.Degradation) -> None:
        self.stats.degraded[kind] += 1
        if self.stats.degraded[kind] == 1:  # once a process: it is the gateway's configuration
            log.warning("degraded: %s", kind.value)


async def _awaiting(routing: Awaitable[ev.Routing]) -> ev.Routing:
    return await routing
