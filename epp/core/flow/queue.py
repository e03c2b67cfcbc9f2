"""Who waits for room, and who is next. Pure: `now_s` is an argument.

Every bound is checked when a request comes, so what waits is never thrown out for what comes later. Bands
are strict: as long as a higher priority waits that may be served, no lower one is.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from epp.core.flow.bands import BandSettings, FlowSettings, Ticket
from epp.core.flow.fairness import AttainedService, FairFlows

_SLACK: Final = 64  # dead entries of the expiry heap that are not worth a clean-up


class Refusal(enum.Enum):
    """Why a request may not wait. Stable: metric labels."""

    TOTAL_REQUESTS = "total_requests"
    TOTAL_BYTES = "total_bytes"
    BAND_REQUESTS = "band_requests"
    BAND_BYTES = "band_bytes"


@dataclass(slots=True)
class BandFill:
    """What waits in one band."""

    settings: BandSettings
    requests: int = 0
    bytes: int = 0


class FlowQueue:
    """All waiting requests of one picker. One thread owns it."""

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._tickets: dict[str, Ticket] = {}
        self._flows: dict[int, FairFlows] = {}
        self._fill: dict[int, BandFill] = {}
        self._expiries: list[tuple[float, str]] = []  # heap; entries of those who are gone go when due
        self._service = AttainedService()
        self._bytes = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._tickets

    @property
    def settings(self) -> FlowSettings:
        return self._settings

    @property
    def bytes(self) -> int:
        """Bodies of all that waits."""
        return self._bytes

    @property
    def fill(self) -> Mapping[int, BandFill]:
        """By priority; bands in which nobody waits are absent."""
        return self._fill

    def offer(self, ticket: Ticket) -> Refusal | None:
        """Let it wait, or say which bound is in the way. An id that waits already raises ValueError."""
        if ticket.id in self._tickets:
            raise ValueError("this request waits already")
        refusal = self._refusal(ticket)
        if refusal is not None:
            return refusal
        priority, settings = ticket.priority, self._settings.band(ticket.priority)
        if priority not in self._flows:
            self._flows[priority] = FairFlows(settings, self._service)
            self._fill[priority] = BandFill(settings)
        self._number += 1
        self._flows[priority].push(ticket, self._number)
        self._tickets[ticket.id] = ticket
        if ticket.expires_s is not None:
            heapq.heappush(self._expiries, (ticket.expires_s, ticket.id))
        self._count(ticket, +1)
        return None

    def take(self, now_s: float, admits: Callable[[int], bool] = lambda _priority: True) -> Ticket | None:
        """The next request of a priority that `admits`, which does not wait any more; None: nobody does."""
        admitted = filter(admits, sorted(self._flows, reverse=True))
        priority = next(admitted, None)
        if priority is None:
            return None
        ticket = self._flows[priority].pop(now_s)
        self._drop(ticket)
        return ticket

    def cancel(self, ticket_id: str) -> bool:
        """It will not wait any longer. False: it does not wait."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return False
        self._flows[ticket.priority].remove(ticket)
        self._drop(ticket)
        return True

    def expire(self, now_s: float) -> Iterator[Ticket]:
        """Those whose time to wait is over, each once."""
        while self._expiries and self._expiries[0][0] <= now_s:
            ticket = self._tickets.get(heapq.heappop(self._expiries)[1])
            if ticket is not None:
                self.cancel(ticket.id)
                yield ticket

    def note_served(self, priority: int, flow: str, tokens: float, now_s: float) -> None:
        """A flow was served: counted for program-aware fairness."""
        self._service.add(flow, tokens, now_s, self._settings.band(priority).half_life_s)

    # --- inside ---------------------------------------------------------------------------------
    def _refusal(self, ticket: Ticket) -> Refusal | None:
        settings, band = self._settings, self._settings.band(ticket.priority)
        fill = self._fill.get(ticket.priority) or BandFill(band)
        if len(self._tickets) >= settings.max_requests:
            return Refusal.TOTAL_REQUESTS
        if self._bytes + ticket.size_bytes > settings.max_bytes:
            return Refusal.TOTAL_BYTES
        if fill.requests >= band.max_requests:
            return Refusal.BAND_REQUESTS
        if fill.bytes + ticket.size_bytes > band.max_bytes:
            return Refusal.BAND_BYTES
        return None

    def _drop(self, ticket: Ticket) -> None:
        del self._tickets[ticket.id]
        self._count(ticket, -1)
        if not self._fill[ticket.priority].requests:
            del self._fill[ticket.priority], self._flows[ticket.priority]
        if len(self._expiries) > 2 * len(self._tickets) + _SLACK:
            self._expiries = [entry for entry in self._expiries if entry[1] in self._tickets]
            heapq.heapify(self._expiries)

    def _count(self, ticket: Ticket, sign: int) -> None:
        fill = self._fill[ticket.priority]
        fill.requests += sign
        fill.bytes += sign * ticket.size_bytes
        self._bytes += sign * ticket.size_bytes
