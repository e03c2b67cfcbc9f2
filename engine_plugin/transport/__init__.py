"""Pulls between engines: control channel, leases, and a mover process that writes over NIXL.

This package exports the engine's whole view of it; everything else here is private to it. What needs numpy is
loaded when it is asked for: a picker gives orders (`orders`) and has none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine_plugin.identity import Address, PeerIdentity
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import MoverDown
from engine_plugin.transport.stats import TransportStats
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

if TYPE_CHECKING:
    from engine_plugin.transport.peer_transport import PeerTransport
    from engine_plugin.transport.tier_memory import TierMemory, TierMemoryError

_LATE = {"PeerTransport": "peer_transport", "TierMemory": "tier_memory", "TierMemoryError": "tier_memory"}

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


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
