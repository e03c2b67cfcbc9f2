"""Which requests run, and what one step computes: continuous batching with chunked prefill.

Semantics: vLLM V1 scheduler without preemption (a request reserves the blocks of prompt and longest
answer when it is admitted): decode first, then prefill in arrival order, within a token budget.
Pure bookkeeping: no bytes, no clock, no waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deploy.local.engine.request import Request, State
from epp.engine_model import batching
from epp.engine_model.timing import EngineTiming, PrefillChunk


class QueueFull(RuntimeError):
    """The waiting queue is at its limit."""


Portion = batching.Portion[Request]


class Scheduler:
    """Queues of one engine; owned by its loop."""

    def __init__(self, *, timing: EngineTiming, max_running: int, max_waiting: int) -> None:
        self._timing = timing
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: deque[Request] = deque()
        self._preparing: list[Request] = []
        self._running: list[Request] = []
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Requests that are not being computed yet: queued, or waiting for their KV."""
        return len(self._waiting) + len(self._preparing)

    @property
    def preparing(self) -> int:
        return len(self._preparing)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._preparing or self._running)

    def requests(self) -> list[Request]:
        return [*self._waiting, *self._preparing, *self._running]

    def submit(self, request: Request) -> None:
        """Raises QueueFull."""
        if len(self._waiting) >= self._max_waiting:
            self.refused += 1
            raise QueueFull(f"{self._max_waiting} requests are waiting")
        self._waiting.append(request)

    def admit(self, start: Callable[[Request], State | None]) -> None:
        """Start waiting requests in order while there is room. `start` reserves what a request
        needs and returns its next state, or None if it must wait: then all behind it wait too."""
        while self._waiting and len(self._running) + len(self._preparing) < self._max_running:
            state = start(self._waiting[0])
            if state is None:
                return
            request = self._waiting.popleft()
            request.report.state = state
            (self._running if state is State.RUNNING else self._preparing).append(request)

    def prepared(self, request: Request) -> None:
        """Its KV has come, or will not come: compute the rest."""
        self._preparing.remove(request)
        request.report.state = State.RUNNING
        self._running.append(request)

    def drop(self, request: Request) -> None:
        """Forget a finished or aborted request wherever it is."""
        for queue in (self._waiting, self._preparing, self._running):
            if request in queue:
                queue.remove(request)
                return

    def take_gone(self) -> list[Request]:
        """Waiting and running requests whose clients have left; those being prepared end by themselves."""
        gone = [r for r in (*self._waiting, *self._running) if r.gone.is_set()]
        for request in gone:
            self.drop(request)
        return gone

    def plan(self) -> list[Portion]:
        """The next step: one token for every decoding request, then prefill chunks in order."""
        return list(batching.plan_step(self._running, self._timing.chunk_tokens))

    def step_ms(self, portions: list[Portion]) -> float:
        """Model time of a step."""
        prefills = [PrefillChunk(p.stop - p.start, p.start) for p in portions if p.is_prefill]
        return self._timing.step_ms(prefills, (p.start for p in portions if not p.is_prefill))
