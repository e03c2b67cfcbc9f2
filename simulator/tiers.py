"""The tiers of a modelled engine: names of blocks as 64-bit numbers, many at a time.

`PlainTier` is the emulated engine's own tier (`epp.engine_model.cache`) with these types; `CompiledTier` does
the same without an object per block, which is what makes large fleets affordable. Both evict the same blocks
in the same order (`tests/unit/simulator/test_tiers.py`), so results do not depend on which one runs.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from epp.engine_model.cache import TierPool

Names: TypeAlias = "array[int]"  # typecode Q, in the order of a chain
SlotNumbers: TypeAlias = "array[int]"  # typecode i
Allocated: TypeAlias = tuple[SlotNumbers, Names]  # slots with one reference each; what was evicted for them
NO_SLOTS: SlotNumbers = array("i")  # never changed


class Tier(Protocol):
    """One tier; the rules are `TierPool`'s."""

    @property
    def slots(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def in_use(self) -> int: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: int) -> bool: ...
    def prefix(self, names: Names) -> SlotNumbers:
        """Slots of the longest prefix of `names` that is held."""

    def allocate(self, count: int) -> Allocated | None:
        """None, and no change: there are not so many."""

    def commit_all(self, slots: SlotNumbers, names: Names) -> bytes:
        """Name them in order; 1 where the name is new, 0 where another slot has it: then no name."""

    def store(self, names: Names) -> tuple[bytes, Names]:
        """Take in what is missing, as far as there is room, unreferenced: 1 where new; and the evicted."""

    def pin(self, slots: SlotNumbers) -> None: ...
    def unpin(self, slots: SlotNumbers) -> None: ...
    def touch(self, names: Names) -> None:
        """Used now: known, unreferenced names become the newest, the head last."""

    def check_integrity(self) -> None:
        """Raises CacheError."""


class PlainTier:
    """A `TierPool` whose names are numbers."""

    def __init__(self, slots: int) -> None:
        self._pool = TierPool(slots)
        self.slots = slots
        self.pin, self.unpin = self._pool.pin, self._pool.unpin
        self.check_integrity = self._pool.check_integrity

    @property
    def available(self) -> int:
        return self._pool.available

    @property
    def in_use(self) -> int:
        return self._pool.in_use

    def __len__(self) -> int:
        return len(self._pool)

    def __contains__(self, name: int) -> bool:
        return name.to_bytes(8, sys.byteorder) in self._pool

    def prefix(self, names: Names) -> SlotNumbers:
        return array("i", self._pool.prefix(_cut(names)))

    def allocate(self, count: int) -> Allocated | None:
        found = self._pool.allocate(count)
        return None if found is None else (array("i", found.slots), _joined(found.evicted))

    def commit_all(self, slots: SlotNumbers, names: Names) -> bytes:
        return bytes(self._pool.commit_all(slots, _cut(names)))

    def store(self, names: Names) -> tuple[bytes, Names]:
        fresh, cut = bytearray(len(names)), _cut(names)
        missing = self._pool.missing(cut)[: self._pool.available]
        allocated = self._pool.allocate(len(missing))
        assert allocated is not None
        new = self._pool.commit_all(allocated.slots, [cut[index] for index in missing])
        self._pool.unpin(allocated.slots)
        for index, is_new in zip(missing, new, strict=True):
            fresh[index] = is_new
        return bytes(fresh), _joined(allocated.evicted)

    def touch(self, names: Names) -> None:
        self._pool.touch(_cut(names))


def _cut(names: Names) -> tuple[bytes, ...]:
    return struct.unpack("8s" * len(names), names.tobytes())


def _joined(names: Iterable[bytes]) -> Names:
    return array("Q", b"".join(names))


def make_tier(slots: int) -> Tier:
    """The compiled one where it was built."""
    return _COMPILED(slots) if _COMPILED is not None else PlainTier(slots)


def _compiled() -> Callable[[int], Tier] | None:
    try:
        from simulator._compiled_tier import CompiledTier
    except ImportError:
        return None
    return CompiledTier


_COMPILED = _compiled()


@dataclass(slots=True)
class EngineTiers:
    """A device tier over a CPU tier that is written through."""

    device: Tier
    cpu: Tier

    @classmethod
    def empty(cls, device_slots: int, cpu_slots: int) -> EngineTiers:
        return cls(make_tier(device_slots), make_tier(cpu_slots))

    def match(self, names: Names) -> tuple[SlotNumbers, SlotNumbers]:
        """A device prefix, and the CPU run that continues it. Changes nothing."""
        device = self.device.prefix(names)
        return device, self.cpu.prefix(names[len(device) :])

    def check_integrity(self) -> None:
        """Raises CacheError if either tier's tables disagree."""
        self.device.check_integrity()
        self.cpu.check_integrity()
