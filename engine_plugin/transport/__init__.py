"""Pulls between engines: control channel, leases, and a mover process that writes over NIXL.

This package exports the engine's whole view of it; everything else here is private to it.
"""

from engine_plugin.identity import Address, PeerIdentity
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import MoverDown
from engine_plugin.transport.peer_transport import PeerTransport
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.tier_memory import TierMemory, TierMemoryError
from engine_plugin.transport.types import (
    BlockStore,
    Fetched,
    Lease,
    Offer,
    Prefetcher,
    PrefetchOrder,
    PrefetchResult,
    PullError,
    PullReason,
)

__all__ = [
    "Address",
    "BlockStore",
    "Faults",
    "Fetched",
    "Lease",
    "Limits",
    "MoverDown",
    "Offer",
    "PeerIdentity",
    "PeerTransport",
    "PrefetchOrder",
    "PrefetchResult",
    "Prefetcher",
    "PullError",
    "PullReason",
    "TierMemory",
    "TierMemoryError",
    "TransportStats",
]
