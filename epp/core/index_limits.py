"""Bounds of a prefix index, and the counts of one batch."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from epp.core.byte_budget import DEFAULT_MAX_BYTES
from epp.core.events import Applied


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds per endpoint, but `max_bytes` for the whole index (policy: `byte_budget`). When full: new
    blocks make no claim (counted as skipped; for want of bytes as refused); waiting and remembered
    blocks are forgotten oldest first."""

    max_blocks: int = 4_000_000
    max_waiting_blocks: int = 16_384
    max_waiting_bytes: int = 16 << 20
    max_remembered_blocks: int = 4_096
    max_bytes: int = DEFAULT_MAX_BYTES


class Tally(Struct, gc=False):
    """Running counts of one batch, in block stores and removals. A struct: one is made for each event."""

    stored: int = 0
    removed: int = 0
    orphans: int = 0
    unresolved: int = 0
    skipped: int = 0
    clears: int = 0
    refused: int = 0
    windowed: int = 0
    unsupported: int = 0

    def count_grouped(self, outcome: str) -> None:
        """Mutates: one store of `WindowGroups.hold`."""
        if outcome == "windowed":
            self.windowed += 1
        elif outcome == "refused":
            self.refused += 1
        else:
            self.skipped += 1

    def applied(self) -> Applied:
        return Applied(
            self.stored,
            self.removed,
            self.orphans,
            self.unresolved,
            self.skipped,
            self.clears,
            refused_blocks=self.refused,
            windowed_blocks=self.windowed,
            unsupported_blocks=self.unsupported,
        )
