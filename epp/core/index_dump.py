"""What an index holds of one endpoint, as columns that another index can restore."""

from __future__ import annotations

from dataclasses import dataclass


class DumpRefused(ValueError):
    """A dump that must not be restored; `reason` is a stable label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GroupDump:
    """Blocks of one attention group that is no full-attention group."""

    group_idx: int | None
    kind: str
    window_tokens: int
    block_size_tokens: int
    refusal: str
    names: bytes
    keys: bytes
    device_copies: bytes
    cpu_copies: bytes


@dataclass(frozen=True, slots=True)
class EndpointDump:
    """Columns of equal length: the engine's name, our key, copies in each tier of every block."""

    scheme: str
    model: str
    block_size_tokens: int
    names: bytes
    keys: bytes
    device_copies: bytes
    cpu_copies: bytes
    complete: bool
    groups: tuple[GroupDump, ...] = ()
    main_group: int | None = None
