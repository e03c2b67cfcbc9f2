"""The flows of one band, and whose turn it is. Pure.

global-strict    the order of the requests decides, whatever flow they are of
round-robin      every flow that waits has one turn, then the next; a new flow is last
program-aware    who was served the fewest tokens lately (halved every `half_life_s`: nothing is held against
                 a program for ever), and to a smaller part whose next request waits longest
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from epp.core.flow.bands import BandSettings, Fairness, Ticket
from epp.core.flow.ordering import OrderedTickets

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
            return self._neediest_flow(now_s)
        return next(iter(self._flows))

    def _neediest_flow(self, now_s: float) -> str:
        """Semantics: llm-d-router, strategy `las`. Of equals the one whose turn it is."""
        settings = self._settings
        arrived = {flow: waiting.head_arrived_s() for flow, waiting in self._flows.items()}
        flows = [flow for flow, at_s in arrived.items() if at_s is not None]
        waits = _spread([max(0.0, now_s - (arrived[flow] or 0.0)) for flow in flows])
        served = _spread([self._service.of(flow, now_s, settings.half_life_s) for flow in flows])
        needs = [
            settings.service_weight * (1.0 - tokens) + settings.wait_weight * wait
            for tokens, wait in zip(served, waits, strict=True)
        ]
        return flows[needs.index(max(needs))]


def _spread(values: list[float]) -> list[float]:
    """From 0 for the lowest to 1 for the highest; all equal: 0."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


class AttainedService:
    """Tokens that flows were served, aged. Bounded in flows."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, tuple[float, float]] = OrderedDict()  # flow: tokens, as of when

    def of(self, flow: str, now_s: float, half_life_s: float) -> float:
        """What counts against it now."""
        tokens, since_s = self._served.get(flow, (0.0, now_s))
        if not half_life_s:
            return tokens
        return tokens * math.pow(0.5, max(0.0, now_s - since_s) / half_life_s)

    def add(self, flow: str, tokens: float, now_s: float, half_life_s: float) -> None:
        """It was served so many more."""
        self._served[flow] = (self.of(flow, now_s, half_life_s) + tokens, now_s)
        self._served.move_to_end(flow)
        if len(self._served) > MAX_REMEMBERED_FLOWS:
            self._served.popitem(last=False)
