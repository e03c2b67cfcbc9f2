"""The flows of one band, and whose turn it is. Pure.

global-strict    the order of the requests decides, whatever flow they are of
round-robin      every flow that waits has one turn, then the next; a new flow is last
program-aware    least attained service first: tokens served, halved every `half_life_s`, so a long
                 program does not starve short ones, and is not held against for ever
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from epp.core.flow.bands import BandSettings, Fairness, Ticket
from epp.core.flow.ordering import Key, OrderedTickets

MAX_REMEMBERED_FLOWS: Final = 10_000  # whose service is remembered; the longest unserved are forgotten


class FairFlows:
    """Waiting requests of one band."""

    def __init__(self, settings: BandSettings, service: AttainedService) -> None:
        self._settings = settings
        self._service = service
        self._flows: OrderedDict[str, OrderedTickets] = OrderedDict()  # in the order of their turns

    def __len__(self) -> int:
        return len(self._flows)

    def push(self, ticket: Ticket, number: int) -> None:
        flow = self._flow_of(ticket)
        if flow not in self._flows:
            self._flows[flow] = OrderedTickets(self._settings.ordering)
        self._flows[flow].push(ticket, number)

    def pop(self, now_s: float) -> Ticket:
        """The next one. Raises IndexError: nobody waits."""
        flow = self._next_flow(now_s)
        waiting = self._flows[flow]
        ticket = waiting.pop()
        if len(waiting):
            self._flows.move_to_end(flow)  # its turn is over
        else:
            del self._flows[flow]
        return ticket

    def remove(self, ticket: Ticket) -> None:
        flow = self._flow_of(ticket)
        waiting = self._flows.get(flow)
        if waiting is None:
            return
        waiting.remove(ticket.id)
        if not len(waiting):
            del self._flows[flow]

    def _flow_of(self, ticket: Ticket) -> str:
        return "" if self._settings.fairness is Fairness.GLOBAL_STRICT else ticket.flow

    def _next_flow(self, now_s: float) -> str:
        if not self._flows:
            raise IndexError("nobody waits")
        if self._settings.fairness is Fairness.PROGRAM_AWARE:
            half_life_s = self._settings.half_life_s
            return min(
                self._heads(), key=lambda head: (self._service.of(head[0], now_s, half_life_s), head[1])
            )[0]
        return next(iter(self._flows))

    def _heads(self) -> Iterator[tuple[str, Key]]:
        for flow, waiting in self._flows.items():
            head = waiting.head()
            if head is not None:
                yield flow, head


class AttainedService:
    """Tokens that flows were served, aged. Bounded in flows."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, tuple[float, float]] = OrderedDict()  # flow: tokens, as of when

    def of(self, flow: str, now_s: float, half_life_s: float) -> float:
        """What counts against it now."""
        tokens, since_s = self._served.get(flow, (0.0, now_s))
        return tokens * math.pow(0.5, max(0.0, now_s - since_s) / half_life_s)

    def add(self, flow: str, tokens: float, now_s: float, half_life_s: float) -> None:
        """It was served so many more."""
        self._served[flow] = (self.of(flow, now_s, half_life_s) + tokens, now_s)
        self._served.move_to_end(flow)
        if len(self._served) > MAX_REMEMBERED_FLOWS:
            self._served.popitem(last=False)
