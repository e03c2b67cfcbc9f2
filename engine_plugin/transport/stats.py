"""Counters of one transport as plain values; the engine turns them into metrics.

Bytes are counted at both ends independently: `served_bytes` is what our mover completed,
`received_bytes` what we verified in our own memory. Peer labels are bounded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_PEER_LABELS = 128
OTHER_PEER = "other"
PULL_OK = "ok"


@dataclass(slots=True)
class TransportStats:
    """Read freely on the transport's loop; only the transport writes.

    A peer is named by its instance once known, else by its address. `refused` counts on the refusing
    and on the refused side; its reason is an identity field name, `auth`, `limit` or `protocol`.
    `chunks_written` (producer) and `chunks_reported` (consumer, as the producer told) count up while
    moves run, so a test can wait for the middle of one.
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
    notifications_missed: int = 0  # consumer: done and verified, but NIXL's own word had not come yet
    moves_out: int = 0
    mover_infos: int = 0  # producer: how often a peer told us about its mover
    sessions_in: int = 0
    sessions_out: int = 0
    quarantined_slots: int = 0
    mover_epoch: int = 0
    chunks_written: int = 0
    chunks_reported: int = 0
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
