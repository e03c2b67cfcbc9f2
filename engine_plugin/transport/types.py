"""Public vocabulary of the transport: leases, offers, results, errors.

Plain values and protocols only; what the engine sees of a pull. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine_plugin.identity import Address


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks the store has pinned: slot and generation of each, in the order they were asked for.

    `still_valid`, where given, is asked once more when the move starts; False refuses it as stale.
    """

    lease_id: str
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    still_valid: Callable[[], bool] | None = None


class BlockStore(Protocol):
    """The engine's CPU tier as the transport sees it. Every method is called on the transport's loop."""

    async def lease(self, hashes: Sequence[bytes], kv_request_id: str, wait_s: float) -> Lease | None:
        """Pin the longest contiguous prefix of `hashes` held here; None when not even the first is.

        Waits up to `wait_s` for a supply announced under `kv_request_id` (P/D hand-off). The
        transport may cancel the call; then nothing may stay pinned.
        """
        ...

    def release(self, lease_id: str) -> None:
        """Unpin; idempotent, unknown ids are ignored."""
        ...

    def slots_usable(self, slots: Sequence[int]) -> None:
        """The quarantine of these destination slots is over: no write can reach them any more."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's answer to a look-up: it holds and has pinned `hit_blocks` from the first hash asked.

    Single use: `fetch` it once, or `abandon` it. The peer releases its pins at `expires_at_s`
    (the loop's clock) in any case.
    """

    offer_id: str
    source: Address
    peer: str
    kv_request_id: str
    hit_blocks: int
    generations: tuple[int, ...]
    checksums: tuple[int, ...]
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that arrived and were verified: `slots[:blocks]` of the fetch are usable, the rest free.

    `shortfall` says why fewer blocks than asked are usable (today only `CHECKSUM`).
    """

    blocks: int
    received_bytes: int
    ms: float
    shortfall: PullReason | None = None


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """What is to be pulled from `source` within `deadline_s`: `hashes`, or, of a picker, which does not know
    how engines name blocks, the whole blocks of `tokens` under this salt and adapter."""

    source: Address
    kv_request_id: str
    hashes: tuple[bytes, ...]
    deadline_s: float
    tokens: Sequence[int] = field(default=(), repr=False)
    cache_salt: str = field(default="", repr=False)
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """How many of the leading blocks the engine holds now, what it received for that, and why not more."""

    blocks: int
    received_bytes: int
    reason: str = "ok"


Prefetcher = Callable[[PrefetchOrder], Awaitable[PrefetchResult]]


class PullReason(StrEnum):
    """Why a pull gave nothing (or less than asked); the label values of `kvpull_pulls_total`."""

    MISS = "miss"
    REFUSED_IDENTITY = "refused_identity"
    REFUSED_AUTH = "refused_auth"
    REFUSED_LIMIT = "refused_limit"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DISCONNECTED = "disconnected"
    CHECKSUM = "checksum"
    STALE = "stale"
    MOVER_DOWN = "mover_down"
    PROTOCOL = "protocol"


class PullError(Exception):
    """A pull that ended without usable blocks: compute instead.

    Attributes:
        detail: names the place, e.g. the identity field for `REFUSED_IDENTITY`.
        quarantined: destination slots that must not be reused until `BlockStore.slots_usable`
            names them; empty for errors of a look-up and of a move that never started.
    """

    def __init__(self, reason: PullReason, detail: str = "", quarantined: Sequence[int] = ()) -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail
        self.quarantined = tuple(quarantined)
