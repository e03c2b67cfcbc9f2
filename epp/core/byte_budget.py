"""How many bytes the index may hold in all, and whose new blocks are refused when they run out.

Policy, in words: claims that exist stay. From seven eighths of the bound on, an endpoint whose records
take as much as the mean endpoint's or more may not grow; at the bound nobody may. An engine evicts
and replaces its blocks all the time, so endpoints above the mean shrink towards it within one
turnover of their caches, and the last eighth is there for endpoints that come late. A refused block
makes no claim and is counted: the index can only claim less.

Here the bytes are estimates for each record of the pure index, measured on CPython 3.11 (resident bytes
of a filled index); the compiled index counts what its maps allocated (`_compiled_table.pxi`).
It must not know which endpoint asks: callers bring their own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

DEFAULT_MAX_BYTES = 2 << 30
RECORD_BYTES = 160  # one engine block name of one endpoint
ROW_BYTES = 90  # one distinct block
SET_BYTES = 180  # one interned set of holders
WAITING_BYTES = 400  # one block whose content is unknown, without its payload
GROUP_RECORD_BYTES = 400  # one block of a sliding-window group


class Account(Protocol):
    """What parts that live in Python in both implementations need of the budget."""

    @property
    def is_full(self) -> bool:
        """At the bound: nothing new at all."""
        ...

    def is_tight_with(self, bytes_: int) -> bool:
        """Whether it is in its last eighth, or would be with `bytes_` more."""
        ...

    def charge(self, bytes_: int) -> None:
        """Mutates: records of some endpoint take `bytes_` more (negative: fewer)."""
        ...

    def refuses(self, own_bytes: int) -> bool:
        """Whether an endpoint whose records take `own_bytes` may not add a block now."""
        ...


@dataclass(slots=True)
class ByteBudget:
    """The budget of a pure index."""

    max_bytes: int
    table_bytes: int = 0  # rows and sets, shared by all endpoints
    endpoint_bytes: int = 0  # records of all endpoints, cleared ones included until swept
    endpoints: int = 0
    tight_bytes: int = field(init=False)  # from here on endpoints at or above the mean may not grow

    def __post_init__(self) -> None:
        self.tight_bytes = self.max_bytes - self.max_bytes // 8

    @property
    def total_bytes(self) -> int:
        return self.table_bytes + self.endpoint_bytes

    @property
    def is_tight(self) -> bool:
        return self.total_bytes >= self.tight_bytes

    def is_tight_with(self, bytes_: int) -> bool:
        """Whether it is tight, or would be with `bytes_` more."""
        return self.table_bytes + self.endpoint_bytes + bytes_ >= self.tight_bytes

    @property
    def is_full(self) -> bool:
        return self.total_bytes >= self.max_bytes

    def charge(self, bytes_: int) -> None:
        self.endpoint_bytes += bytes_

    def refuses(self, own_bytes: int) -> bool:
        """Whether an endpoint whose records take `own_bytes` may not add a block now."""
        if not self.is_tight:
            return False
        return self.is_full or own_bytes * self.endpoints >= self.endpoint_bytes
