"""What an index holds of one endpoint, as columns of fixed width: dump, check, take over.

A dump is good for an index of the same seed and the same key scheme: keys mean nothing elsewhere.
Columns are little endian. Blocks without a copy are those that are only remembered, oldest first.
Blocks whose content was not known are left out, as are copies beyond 65,535: then `complete` is False and
the restored view is a lower bound; otherwise it goes on exactly like the dumped one. Counters of the
past (forgotten, refused) are not part of it.

A dump may come from anywhere, so nothing in it is trusted but the keys, which nothing here can check:
whoever takes dumps from others has to know who made them. It must not know files or sockets.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from epp.core.byte_budget import ByteBudget
from epp.core.engine_blocks import EngineBlocks
from epp.core.index_limits import IndexLimits
from epp.core.types import BlockKey, EngineBlockHash
from epp.core.window_groups import MAX_GROUPS, WindowGroups

MAX_COPIES = 0xFFFF
MAX_BLOCK_SIZE_TOKENS = 1 << 31
NAME_BYTES, COPY_BYTES = 8, 2
_Record = tuple[EngineBlockHash, BlockKey, int, int]


class DumpRefused(ValueError):
    """`reason` is a stable label: scheme, model, not_empty, columns, block_size, limits, copies, duplicate,
    full (no bytes left), group, overtaken (cleared or removed meanwhile). The text shows no data."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"dump refused: {reason}")
        self.reason = reason


class Columns(NamedTuple):
    """One entry a block in each."""

    names: bytes = b""  # u64, the engine's names
    keys: bytes = b""  # u64, ours
    device_copies: bytes = b""  # u16
    cpu_copies: bytes = b""  # u16


@dataclass(frozen=True, slots=True)
class GroupDump:
    """One group besides the full-attention one; see `window_groups`."""

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
    """Everything of one endpoint."""

    scheme: str
    model: str
    block_size_tokens: int
    names: bytes
    keys: bytes
    device_copies: bytes
    cpu_copies: bytes
    complete: bool
    groups: tuple[GroupDump, ...] = ()
    main_group: int | None = None  # number of the full-attention group, where it has one

    @property
    def blocks(self) -> int:
        return len(self.names) // NAME_BYTES

    def records(self, start: int, stop: int) -> Iterator[_Record]:
        """Name, key, device and CPU copies of blocks [start, stop)."""
        return _records(self, start, stop)


class Frozen(Protocol):
    """The records of an endpoint as they were at one moment."""

    def step(self, blocks: int) -> bool:
        """Mutates: make the columns of up to `blocks` more records. False: all done."""
        ...

    def columns(self) -> tuple[Columns, bool]:
        """When all is done: the columns, and whether they tell all of each record."""
        ...


class FrozenRecords:
    """Those of a pure index. To take them is one step: the interpreter has no cheaper copy."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._rows = list(blocks.records())
        self._parts: list[Columns] = []
        self._exact = True
        self._done = 0

    def step(self, blocks: int) -> bool:
        part, exact = _columns(iter(self._rows[self._done : self._done + blocks]))
        self._parts.append(part)
        self._exact = self._exact and exact
        self._done += blocks
        return self._done < len(self._rows)

    def columns(self) -> tuple[Columns, bool]:
        return Columns(*map(b"".join, zip(*self._parts, strict=True))), self._exact


def dump_groups(groups: WindowGroups | None) -> tuple[tuple[GroupDump, ...], bool]:
    """Its other groups, and whether all of their blocks are in it."""
    if groups is None:
        return (), True
    dumps: list[GroupDump] = []
    whole = not groups.awaited
    for number, kind, window_tokens, block_size_tokens, refusal, held in groups.groups():
        columns, exact = _columns(held)
        dumps.append(GroupDump(number, kind, window_tokens, block_size_tokens, refusal, *columns))
        whole = whole and exact
    return tuple(dumps), whole


def _columns(records: Iterator[_Record]) -> tuple[Columns, bool]:
    columns = array("Q"), array("Q"), array("H"), array("H")
    exact = True
    for name, key, device, cpu in records:
        exact = exact and device <= MAX_COPIES and cpu <= MAX_COPIES
        for column, value in zip(
            columns, (name, key, min(device, MAX_COPIES), min(cpu, MAX_COPIES)), strict=True
        ):
            column.append(value)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    return Columns(*[column.tobytes() for column in columns]), exact


def _records(dump: EndpointDump | GroupDump, start: int, stop: int) -> Iterator[_Record]:
    count = stop - start
    columns = [
        struct.unpack_from(f"<{count}{code}", column, start * struct.calcsize(f"<{code}"))
        for code, column in zip(
            "QQHH", (dump.names, dump.keys, dump.device_copies, dump.cpu_copies), strict=True
        )
    ]
    return zip(*columns, strict=True)


def check_dump(dump: EndpointDump, scheme: str, model: str, limits: IndexLimits) -> None:
    """Everything that can be checked before anything is taken over.

    Raises:
        DumpRefused: see there.
    """
    _require(dump.scheme == scheme, "scheme")
    _require(dump.model == model, "model")
    _check_columns(dump)
    _require(0 <= dump.block_size_tokens < MAX_BLOCK_SIZE_TOKENS, "block_size")
    _require(dump.block_size_tokens or not dump.names, "block_size")
    _require(dump.blocks <= limits.max_blocks, "limits")
    _require(len(dump.groups) <= MAX_GROUPS + 1, "limits")
    held = 0
    for group in dump.groups:
        _check_columns(group)
        held += len(group.names) // NAME_BYTES
    _require(held <= limits.max_blocks, "limits")


def _check_columns(dump: EndpointDump | GroupDump) -> None:
    columns = dump.names, dump.keys, dump.device_copies, dump.cpu_copies
    _require(all(isinstance(column, bytes) for column in columns), "columns")
    blocks, rest = divmod(len(dump.names), NAME_BYTES)
    _require(not rest and len(dump.keys) == blocks * NAME_BYTES, "columns")
    _require(len(dump.device_copies) == len(dump.cpu_copies) == blocks * COPY_BYTES, "columns")


def load_records(
    blocks: EngineBlocks, records: Iterator[_Record], limits: IndexLimits, budget: ByteBudget
) -> None:
    """Mutates: take over records of a checked dump.

    Raises:
        DumpRefused: a block twice, too many without a copy, or no bytes left.
    """
    for name, key, device, cpu in records:
        _require(not budget.refuses(blocks.own_bytes), "full")
        _require(bool(device or cpu) or blocks.remembered < limits.max_remembered_blocks, "limits")
        _require(blocks.put(name, key, device, cpu), "duplicate")


def restore_groups(groups: WindowGroups, dump: EndpointDump) -> None:
    """Mutates: take over the groups of a checked dump.

    Raises:
        DumpRefused: a group twice, a block twice in one, or no bytes left.
    """
    for group in dump.groups:
        number = group.group_idx
        shape = group.kind, group.window_tokens, group.block_size_tokens, group.refusal
        _require(group.refusal or number != dump.main_group, "group")
        _require(groups.put_group(number, *shape), "group")
        for name, key, device, cpu in _records(group, 0, len(group.names) // NAME_BYTES):
            _require(device or cpu, "copies")
            _require(groups.key_of(number, name) is None, "duplicate")
            _require(groups.put(number, name, key, device, cpu), "full")


def _require(holds: object, reason: str) -> None:
    if not holds:
        raise DumpRefused(reason)
