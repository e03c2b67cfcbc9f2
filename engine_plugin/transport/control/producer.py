"""What all sessions of one producer share: its store, its movers, and what it gives out to peers in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from engine_plugin.identity import PeerIdentity
from engine_plugin.transport.checksums import Checksums
from engine_plugin.transport.control.leases import LeaseBook
from engine_plugin.transport.control.turns import Room, Turns
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.supervisor import MoverSupervisor
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import BlockStore


@dataclass(frozen=True, slots=True)
class Producer:
    """`leasing` and `moves` are given out by the address a peer speaks from, which it cannot choose."""

    identity: PeerIdentity
    store: BlockStore
    checksums: Checksums
    movers: MoverSupervisor
    leases: LeaseBook
    leasing: Turns  # look-ups that may pin, and what they pin
    moves: Turns
    limits: Limits
    stats: TransportStats
    faults: Faults | None
    tasks: set[asyncio.Task[None]]

    def run(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """A request as a task that `stop` waits for."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def leasing_turns(limits: Limits, tier_bytes: int) -> Turns:
    """What may be pinned at the same time."""
    total_bytes = min(tier_bytes, max(int(tier_bytes * limits.leased_share), limits.leased_floor_bytes))
    return Turns(
        total=Room(limits.leases_total, total_bytes),
        each=Room(limits.leases, min(limits.leased_bytes, total_bytes)),
        waiting=limits.lookups_waiting,
    )


def moving_turns(limits: Limits) -> Turns:
    """What may be written at the same time."""
    return Turns(
        total=Room(limits.moves_total, limits.bytes_total),
        each=Room(limits.moves_in_flight, limits.bytes_in_flight),
        waiting=limits.moves_waiting,
    )
