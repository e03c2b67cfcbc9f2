"""What one engine step computes: decode first, then prefill in order, within a token budget.

Semantics: vLLM V1 scheduler with chunked prefill. The emulated engine plans its steps here in real time, the
simulator in virtual time. Pure bookkeeping: no clock, no cache, no events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Sequence(Protocol):
    """A running request. `computed` tokens of it are in the device tier."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def computed(self) -> int: ...


S = TypeVar("S", bound=Sequence)


class Portion(NamedTuple, Generic[S]):
    """What one step does for one request: compute tokens `[start, stop)`. A tuple: one is made for every
    request of every step."""

    request: S
    start: int
    stop: int

    @property
    def is_prefill(self) -> bool:
        return self.start < self.request.prompt_tokens


def plan_step(running: Iterable[S], budget_tokens: int) -> Iterator[Portion[S]]:
    """One token for every decoding request, then prefill chunks, both in the order given. The portions of
    a step never have more than `budget_tokens` in all."""
    rows = list(running)
    for request in rows:
        if request.computed >= request.prompt_tokens and budget_tokens:
            yield Portion(request, request.computed, request.computed + 1)
            budget_tokens -= 1
    for request in rows:
        if request.computed < request.prompt_tokens and budget_tokens:
            count = min(budget_tokens, request.prompt_tokens - request.computed)
            yield Portion(request, request.computed, request.computed + count)
            budget_tokens -= count


def has_budget_left(running: Iterable[Sequence], budget_tokens: int) -> bool:
    """Whether a step would leave budget after all that runs. vLLM looks at its waiting queue only then:
    behind a long prefill a request stays *waiting*, its pull not begun."""
    wanted = 0
    for request in running:
        wanted += max(1, request.prompt_tokens - request.computed)
        if wanted >= budget_tokens:
            return False
    return True
