"""The requests of one flow, next one first. Pure.

A heap with lazy removal: a cancelled request costs O(1), and its entry goes when it comes up or when more
than half of the entries are dead, so that memory follows what waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Final

from epp.core.flow.bands import Ordering, Ticket

Key = tuple[float, float, int]
_SLACK: Final = 16  # dead entries that are not worth a clean-up


def order_key(ordering: Ordering) -> Callable[[Ticket, int], Key]:
    """Smaller goes first; `number` of arrival settles ties, so that equals stay first come, first served."""
    if ordering is Ordering.EDF:
        return lambda ticket, number: (_or_never(ticket.expires_s), ticket.arrived_s, number)
    if ordering is Ordering.SLO_DEADLINE:
        return lambda ticket, number: (_or_never(ticket.slo_due_s), ticket.arrived_s, number)
    return lambda ticket, number: (ticket.arrived_s, 0.0, number)


def _or_never(at_s: float | None) -> float:
    return math.inf if at_s is None else at_s


class OrderedTickets:
    """One flow's waiting requests."""

    __slots__ = ("_alive", "_heap", "_key")

    def __init__(self, ordering: Ordering) -> None:
        self._key = order_key(ordering)
        self._heap: list[tuple[Key, Ticket]] = []
        self._alive: set[str] = set()

    def __len__(self) -> int:
        return len(self._alive)

    def push(self, ticket: Ticket, number: int) -> None:
        """`number` is unique and grows."""
        heapq.heappush(self._heap, (self._key(ticket, number), ticket))
        self._alive.add(ticket.id)

    def head(self) -> Key | None:
        """Key of the next one; None: empty."""
        heap = self._heap
        while heap and heap[0][1].id not in self._alive:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def head_arrived_s(self) -> float | None:
        """When the next one came; None: empty."""
        return None if self.head() is None else self._heap[0][1].arrived_s

    def pop(self) -> Ticket:
        """The next one. Raises IndexError: empty."""
        if self.head() is None:
            raise IndexError("nobody waits")
        ticket = heapq.heappop(self._heap)[1]
        self._alive.discard(ticket.id)
        return ticket

    def remove(self, ticket_id: str) -> None:
        """It does not wait any more. Unknown ids are ignored."""
        self._alive.discard(ticket_id)
        if len(self._heap) > 2 * len(self._alive) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1].id in self._alive]
            heapq.heapify(self._heap)
