"""One cache group of an endpoint besides its full-attention group: what it is, and what it holds.

The rules are in `window_groups`, which changes it; it must not know other groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from epp.core.events import FULL_ATTENTION_KINDS, SLIDING_WINDOW_KINDS, BlockStored
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_walk import Lane

MAX_WINDOW_TOKENS = 1 << 31
_ALL = 1 << 62  # blocks


class HeldBlock(Struct, gc=False):
    """Copies of one block by tier. Its content is unknown while `key` is None."""

    key: BlockKey | None
    device: int = 0
    cpu: int = 0


@dataclass(slots=True)
class WindowGroup:
    """Blocks by the engine's names, and lanes of the names with a copy in a tier, by content."""

    device: Lane
    cpu: Lane
    any: Lane  # the sum of both
    kind: str = ""  # empty: only removals were heard
    window_tokens: int = 0
    block_size_tokens: int = 0  # 0: no store told it yet
    refusal: str = "group_kind"  # why no rule applies; empty: one does
    held: dict[EngineBlockHash, HeldBlock] = field(default_factory=dict)

    def needed_blocks(self, block_size_tokens: int) -> int:
        """How many blocks at its end a prefix needs here."""
        if self.kind in FULL_ATTENTION_KINDS:
            return _ALL
        return -(-(self.window_tokens - 1) // block_size_tokens)

    def claim(self, key: BlockKey, tier: CacheTier) -> None:
        """Mutates: one more name of this content has a copy in `tier`."""
        (self.device if tier is CacheTier.DEVICE else self.cpu).add(key)
        self.any.add(key)

    def unclaim(self, key: BlockKey, tier: CacheTier) -> None:
        """Mutates: one fewer."""
        (self.device if tier is CacheTier.DEVICE else self.cpu).drop(key)
        self.any.drop(key)


def refusal_of(event: BlockStored) -> str:
    """Why a group that is told by this store has no rule; empty: it has one."""
    if event.group_idx is None:
        return "group_number"
    if event.group_kind in FULL_ATTENTION_KINDS:
        return ""
    if event.group_kind not in SLIDING_WINDOW_KINDS:
        return "group_kind"
    window = event.group_window_tokens
    return "" if window is not None and 0 < window <= MAX_WINDOW_TOKENS else "group_window"
