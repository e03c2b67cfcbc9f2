"""Who may start now: a scarce thing given out in turns between peers, and rates that nobody may exceed.

A request that finds no room waits instead of being refused, behind its own peer's earlier ones and in turn
with the other peers', so a peer that asks for much delays itself and nobody else for longer than one request.
Every wait is bounded by its caller, every queue by `waiting`. Knows neither network nor what it gives out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field


class NoRoom(Exception):
    """Refused at once: it would never fit (`count`, `size`), or too many wait already (`waiting`)."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(slots=True)
class Room:
    """How many may be in use at once, and how much they may hold together; also what is in use."""

    count: int = 0
    size: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place.

    Attributes:
        turn: resolves when it may start, or was given up.
        granted: it holds room now.
    """

    peer: str
    size: int
    turn: asyncio.Future[None]
    granted: bool = False


@dataclass(slots=True)
class _Peer:
    used: Room = field(default_factory=Room)
    waiting: deque[Ticket] = field(default_factory=deque)


class Turns:
    """`total` for all peers together, `each` for one of them; at most `waiting` requests of each wait."""

    def __init__(self, *, total: Room, each: Room, waiting: int) -> None:
        self._total = total
        self._each = each
        self._waiting = waiting
        self._used = Room()
        self._peers: dict[str, _Peer] = {}  # in the order of their turns

    @property
    def used(self) -> Room:
        """What all peers hold now."""
        return Room(self._used.count, self._used.size)

    def largest(self) -> int:
        """The largest `size` that can ever fit."""
        return min(self._total.size, self._each.size)

    def request(self, peer: str, size: int) -> Ticket:
        """A place in the queue, or the room itself if `granted` at once. Raises NoRoom."""
        if min(self._total.count, self._each.count) < 1:
            raise NoRoom("count")
        if size > self.largest():
            raise NoRoom("size")
        ticket = Ticket(peer, size, asyncio.get_running_loop().create_future())
        state = self._peers.setdefault(peer, _Peer())
        state.waiting.append(ticket)
        self._grant()
        if not ticket.granted and len(state.waiting) > self._waiting:
            state.waiting.remove(ticket)
            raise NoRoom("waiting")
        return ticket

    async def wait(self, ticket: Ticket, wait_s: float) -> bool:
        """Until its turn, at most `wait_s`; False when that did not come or it was given up. A cancelled
        wait leaves."""
        try:
            if not ticket.turn.done():
                await asyncio.wait({ticket.turn}, timeout=wait_s)
        except asyncio.CancelledError:
            self.leave(ticket)
            raise
        if not ticket.granted:
            self.leave(ticket)
        return ticket.granted

    def resize(self, ticket: Ticket, size: int) -> None:
        """What a granted request really holds; more than asked is booked, too, whatever the limits."""
        state = self._peers.get(ticket.peer)
        if state is None or not ticket.granted:
            return
        more, ticket.size = size - ticket.size, size
        self._used.size += more
        state.used.size += more
        self._grant()

    def leave(self, ticket: Ticket) -> None:
        """Give the room back, or the place in the queue; idempotent."""
        state = self._peers.get(ticket.peer)
        if state is None:
            return
        if ticket in state.waiting:
            state.waiting.remove(ticket)
            ticket.turn.set_result(None)
        elif ticket.granted:
            ticket.granted = False
            self._used.count -= 1
            self._used.size -= ticket.size
            state.used.count -= 1
            state.used.size -= ticket.size
        if not state.waiting and not state.used.count:
            del self._peers[ticket.peer]
        self._grant()

    def _grant(self) -> None:
        while (ticket := self._next()) is not None:
            state = self._peers.pop(ticket.peer)
            self._peers[ticket.peer] = state  # its next turn comes after everybody's
            state.waiting.popleft()
            for used in (self._used, state.used):
                used.count += 1
                used.size += ticket.size
            ticket.granted = True
            ticket.turn.set_result(None)

    def _next(self) -> Ticket | None:
        """The first in turn that its own peer's room allows; it is waited for if the total has none."""
        for state in self._peers.values():
            if state.waiting and _fits(state.waiting[0], state.used, self._each):
                return state.waiting[0] if _fits(state.waiting[0], self._used, self._total) else None
        return None


def _fits(ticket: Ticket, used: Room, room: Room) -> bool:
    return used.count < room.count and used.size + ticket.size <= room.size


class TokenBucket:
    """At most `burst` at once and `rate_per_s` in the long run. The clock is the caller's."""

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> bool:
        """Whether there was enough; if not, nothing is taken."""
        self._fill(now_s)
        if amount > self._tokens:
            return False
        self._tokens -= amount
        return True

    def full(self, now_s: float) -> bool:
        """Whether nothing was taken lately."""
        self._fill(now_s)
        return self._tokens >= self._burst

    def _fill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s
