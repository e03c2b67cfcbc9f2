"""Leases granted to peers, and what one address has open. Every pin here has a deadline."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_plugin.transport.control.turns import Ticket, TokenBucket
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import BlockStore, Lease


@dataclass(slots=True)
class PeerBudget:
    """What the peers at one address have open, over all their connections.

    Attributes:
        leased: places in `Producer.leasing` that belong to granted leases.
        movers: new movers they may still tell us about.
    """

    host: str
    movers: TokenBucket
    connections: int = 0
    leased: set[Ticket] = field(default_factory=set)

    def idle(self, now_s: float) -> bool:
        """Nothing is open, and nothing need be remembered."""
        return not self.connections and not self.leased and self.movers.full(now_s)


@dataclass(slots=True, eq=False)
class GrantedLease:
    """A lease as the peer knows it: an unguessable token, bound to one session, good for one move."""

    token: str
    lease: Lease
    owner: object
    on_release: Callable[[], None]
    timer: asyncio.TimerHandle
    on_expiry: Callable[[], None] | None = None  # set while a move uses it: cancel that move


class LeaseBook:
    """Every lease this producer has granted and not yet released."""

    def __init__(self, store: BlockStore, limits: Limits, stats: TransportStats) -> None:
        self._store = store
        self._limits = limits
        self._stats = stats
        self._granted: dict[str, GrantedLease] = {}

    def grant(self, lease: Lease, owner: object, on_release: Callable[[], None]) -> GrantedLease:
        """Book pinned blocks for `owner`; they are released at the latest after `lease_s`."""
        token = secrets.token_hex(8)
        timer = asyncio.get_running_loop().call_later(self._limits.lease_s, self._expire, token)
        granted = GrantedLease(token, lease, owner, on_release, timer)
        self._granted[token] = granted
        self._stats.leases += 1
        return granted

    def find(self, token: str, owner: object) -> GrantedLease | None:
        """The lease, if it is `owner`'s and no move has used it."""
        granted = self._granted.get(token)
        if granted is None or granted.owner is not owner or granted.on_expiry is not None:
            return None
        return granted

    def use(self, granted: GrantedLease, on_expiry: Callable[[], None]) -> None:
        """A move starts on it: no second one may, and its deadline starts anew."""
        granted.timer.cancel()
        granted.timer = asyncio.get_running_loop().call_later(
            self._limits.lease_s, self._expire, granted.token
        )
        granted.on_expiry = on_expiry

    def release(self, token: str) -> None:
        """Unpin; idempotent."""
        granted = self._granted.pop(token, None)
        if granted is None:
            return
        granted.timer.cancel()
        self._stats.leases -= 1
        self._store.release(granted.lease.lease_id)
        granted.on_release()

    def release_unused(self, owner: object) -> None:
        """Unpin what a session leaves behind; a running move keeps its own until it ends."""
        for granted in list(self._granted.values()):
            if granted.owner is owner and granted.on_expiry is None:
                self.release(granted.token)

    def _expire(self, token: str) -> None:
        """Deadline: cancel a move that still reads, give it a moment, then unpin in any case.

        Unpinning under a stuck transfer is safe for the peer: its slots are quarantined, and it checks
        what it got against the checksums of the offer.
        """
        granted = self._granted[token]
        self._stats.leases_expired += 1
        if granted.on_expiry is None:
            self.release(token)
            return
        granted.on_expiry()
        loop = asyncio.get_running_loop()
        granted.timer = loop.call_later(self._limits.drain_s, self.release, token)
