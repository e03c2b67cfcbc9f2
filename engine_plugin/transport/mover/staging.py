"""Small scattered blocks travel packed: gathered here, written as one descriptor, scattered over there.

A descriptor costs more than the bytes of a small block, so what has no neighbours is copied twice instead.
Two areas outside the tier: cells that a mover gathers into, given back when their transfer has resolved; and
the inbox, whose windows the *consumer's engine* hands out (`Windows`), one for a move. A late write may reach
a window, so it is set aside with its move; its content is scattered only after the source has said that the
move is over and whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

INBOX_BYTES: Final = 32 << 20
CELL_BYTES: Final = 2 << 20
CELLS: Final = 6
PACKED_BELOW_BYTES: Final = 16 << 10  # blocks from here on cost less as they are; see docs/figures.md


class Staging:
    """One mover's areas; pages are touched when they are used."""

    def __init__(self, tier: Any) -> None:
        """`tier`: uint8, (slots, slot bytes)."""
        self._tier = tier
        self._slot_bytes = int(tier.shape[1])
        self.cell_blocks = CELL_BYTES // self._slot_bytes
        self._memory = mmap.mmap(-1, INBOX_BYTES + CELLS * CELL_BYTES)
        self._array: Any = np.frombuffer(self._memory, dtype=np.uint8)
        self._free = list(range(CELLS))
        self.address = int(self._array.ctypes.data)
        self.total_bytes = len(self._memory)

    def take(self) -> int | None:
        """A free cell, until `give`."""
        return self._free.pop() if self._free else None

    def give(self, cell: int) -> None:
        """Its transfer has resolved."""
        self._free.append(cell)

    def gather(self, cell: int, slots: Sequence[int]) -> int:
        """Copy these slots into a cell, one after the other; its address."""
        at = INBOX_BYTES + cell * CELL_BYTES
        size = len(slots) * self._slot_bytes
        into = self._array[at : at + size].reshape(len(slots), self._slot_bytes)
        np.take(self._tier, slots, axis=0, out=into, mode="clip")
        return self.address + at

    def scatter(self, offset: int, slots: Sequence[int]) -> None:
        """Copy what lies at `offset` of the inbox into these slots. Raises ValueError beyond its end."""
        size = len(slots) * self._slot_bytes
        if offset < 0 or offset + size > INBOX_BYTES:
            raise ValueError(f"{size} bytes at {offset} are not in the inbox")
        self._tier[slots] = self._array[offset : offset + size].reshape(len(slots), self._slot_bytes)
