"""Counters of one transport as plain values; the engine turns them into metrics.

Bytes are counted at both ends independently: `served_bytes` is what our mover completed,
`received_bytes` what we verified in our own memory. Peer labels are bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

MAX_PEER_LABELS = 128
OTHER_PEER = "other"
PULL_OK = "ok"
DURATION_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MAX_FRESH: Final = 4096  # durations that nobody has taken yet


@dataclass(slots=True)
class Durations:
    """A histogram over `DURATION_BOUNDS_S`; one writer, and one taker of single values on any thread.

    `counts`: by bucket, not cumulated, with one more for what is longer than the last bound.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    total_s: float = 0.0
    _fresh: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FRESH))

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        self._fresh.append(seconds)

    def take(self) -> list[float]:
        """The durations since the last call, at most the latest `MAX_FRESH`."""
        return [self._fresh.popleft() for _ in range(len(self._fresh))]


@dataclass(slots=True)
class TransportStats:
    """Read freely on the transport's loop; only the transport writes.

    A peer is named by its instance once known, else by its address. `refused` counts on the refusing
    and on the refused side; its reason is an identity field name, `auth`, `limit` or `protocol`.
    `session_setup_s`: dial and handshake of sessions that we opened; `transfer_s`: a fetch, from its start to
    its last verified block. `chunks_written` (producer) and `chunks_reported` (consumer, as the producer
    told) count up while moves run, so a test can wait for the middle of one.
    """

    received_bytes: Counter[str] = field(default_factory=Counter)
    served_bytes: Counter[str] = field(default_factory=Counter)
    pulls: Counter[str] = field(default_factory=Counter)  # by PullReason value, or "ok"
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (peer, reason)
    asked_blocks: int = 0
    offered_blocks: int = 0
    received_blocks: int = 0
    served_blocks: int = 0
    bad_frames: int = 0
    handshakes_unfinished: int = 0  # producer: a caller left, or fell silent, before it had proved itself
    leases: int = 0
    leases_expired: int = 0
    lookups: int = 0
    moves_in: int = 0
    packed_moves: int = 0  # consumer: small scattered blocks that came packed
    notifications_missed: int = 0  # consumer: done and verified, but NIXL's own word had not come yet
    moves_out: int = 0
    mover_infos: int = 0  # producer: how often a peer told us about its mover
    sessions_in: int = 0
    sessions_out: int = 0
    quarantined_slots: int = 0
    mover_epoch: int = 0
    chunks_written: int = 0
    chunks_reported: int = 0
    session_setup_s: Durations = field(default_factory=Durations)
    transfer_s: Durations = field(default_factory=Durations)
    _labels: set[str] = field(default_factory=set)

    def peer_label(self, peer: str) -> str:
        """`peer` itself while there is room for another label, then `other`."""
        if peer in self._labels:
            return peer
        if len(self._labels) >= MAX_PEER_LABELS:
            return OTHER_PEER
        self._labels.add(peer)
        return peer

    def count_refusal(self, peer: str, reason: str) -> None:
        """One refusal, on whichever side."""
        self.refused[(self.peer_label(peer), reason)] += 1
