"""The bytes of both tiers and the copies between them. Blocking numpy work for worker threads.

Callers own the bookkeeping: a slot handed in here is theirs for the whole call, and two calls that
run at the same time touch different slots. Nothing here knows requests, names or events.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.local.engine.content import Content, Words, digest


@dataclass(frozen=True, slots=True)
class Move:
    """One block that exists in `cpu_slot` and `device_slot`, as source and destination of a copy."""

    device_slot: int
    cpu_slot: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Part of one step: write tokens `[start, stop)` of a sequence that lives in `slots`, copy the
    blocks in `offload` to the CPU tier, and, if `sum_from` is given, summarise what the device
    holds of tokens `[sum_from, stop)`."""

    slots: Sequence[int]
    start: int
    stop: int
    seeds: Words
    offload: Sequence[Move]
    sum_from: int | None


def _lazy_zeros(shape: tuple[int, int, int]) -> Words:
    """Zeroed words whose pages are touched on first use, in huge pages where the machine has them:
    with small ones the first pass over 96 MiB costs more than half a second."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared ones would get no huge pages
    pages = mmap.mmap(-1, math.prod(shape) * 8, flags=private)
    with contextlib.suppress(OSError):  # only a hint
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint64).reshape(shape)


class KvMemory:
    """Device tier (pages are touched on first use only) over a CPU tier given as a byte array.

    Attributes:
        device: words of the device tier, (slots, tokens of a block, words of a token).
    """

    def __init__(
        self, *, device_slots: int, block_size: int, content: Content, cpu: NDArray[np.uint8]
    ) -> None:
        self._block_size = block_size
        self._content = content
        self.device = _lazy_zeros((device_slots, block_size, content.words))
        self._cpu: Words = cpu.view(np.uint64).reshape(len(cpu), block_size, content.words)

    @property
    def block_bytes(self) -> int:
        return self._block_size * self._content.words * 8

    def step(self, parts: Sequence[Compute]) -> list[int]:
        """Do the parts in order; the summary of each (0 where none was asked for)."""
        return [self._compute(part) for part in parts]

    def restore(self, moves: Sequence[Move], seeds: Words) -> int:
        """Copy CPU blocks, given in chain order, to the device and compare every byte with what
        `seeds` (of all their tokens) stand for. Returns how many leading blocks are right."""
        size = self._block_size
        for index, move in enumerate(moves):
            rows = self.device[move.device_slot]
            np.copyto(rows, self._cpu[move.cpu_slot])
            if not self._content.matches(rows, seeds[index * size : (index + 1) * size]):
                return index
        return len(moves)

    def close(self) -> None:
        """Drop the views, so that the owner of the CPU tier can unmap it."""
        self.device = np.zeros((0, 0, 0), dtype=np.uint64)
        self._cpu = self.device

    def _compute(self, part: Compute) -> int:
        self._write(part)
        for move in part.offload:
            np.copyto(self._cpu[move.cpu_slot], self.device[move.device_slot])
        return 0 if part.sum_from is None else self._sum(part.slots, part.sum_from, part.stop)

    def _write(self, part: Compute) -> None:
        size = self._block_size
        position = part.start
        while position < part.stop:
            block, offset = divmod(position, size)
            count = min(size - offset, part.stop - position)
            first = position - part.start
            rows = self.device[part.slots[block], offset : offset + count]
            self._content.write(rows, part.seeds[first : first + count])
            position += count

    def _sum(self, slots: Sequence[int], start: int, stop: int) -> int:
        """Digest of one word a token, read from the device tier through the block table."""
        positions = np.arange(start, stop)
        table = np.asarray(slots, dtype=np.intp)[positions // self._block_size]
        columns = self._content.columns(start, stop - start)
        return digest(self.device[table, positions % self._block_size, columns], start)
