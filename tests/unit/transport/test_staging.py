"""The areas beside the tier: windows never overlap, and what is gathered is what is scattered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.transport.mover.staging import CELLS, INBOX_BYTES, Staging
from engine_plugin.transport.mover.windows import Windows


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60))
def test_windows_lie_inside_the_inbox_and_never_overlap(steps: list[tuple[int, bool]]) -> None:
    windows, held = Windows(100), dict[int, int]()
    for size, giving in steps:
        if giving and held:
            offset = next(iter(held))
            windows.give(offset)
            windows.give(offset)
            del held[offset]
            continue
        taken = windows.take(size)
        used = sorted((at, at + length) for at, length in held.items())
        if taken is None:
            ends = [0, *(end for _, end in used)]
            starts = [*(start for start, _ in used), 100]
            assert max(start - end for start, end in zip(starts, ends, strict=True)) < size
            continue
        assert 0 <= taken <= 100 - size
        assert all(end <= taken or taken + size <= start for start, end in used)
        held[taken] = size


def test_a_mover_without_an_inbox_gives_no_window() -> None:
    assert Windows(0).take(1) is None
    assert Windows(10).take(0) is None


def test_blocks_are_gathered_in_the_order_asked_and_scattered_into_theirs() -> None:
    tier = np.arange(8, dtype=np.uint8).repeat(4096).reshape(8, 4096)
    staging = Staging(tier)
    cell = staging.take()
    assert cell is not None
    at = staging.gather(cell, [5, 0, 3]) - staging.address
    gathered = staging._array[at : at + 3 * 4096]
    assert [int(gathered[place * 4096]) for place in range(3)] == [5, 0, 3]
    staging._array[4096 : 3 * 4096] = gathered[: 2 * 4096]
    staging.scatter(4096, [7, 1])
    assert [int(row[0]) for row in tier] == [0, 0, 2, 3, 4, 5, 6, 5]
    for offset in (-1, INBOX_BYTES - 4096):
        with pytest.raises(ValueError, match="not in the inbox"):
            staging.scatter(offset, [1, 2])


def test_cells_are_lent_one_by_one() -> None:
    staging = Staging(np.zeros((1, 4096), np.uint8))
    taken = [staging.take() for _ in range(CELLS)]
    assert sorted(cell for cell in taken if cell is not None) == list(range(CELLS))
    assert staging.take() is None
    staging.give(3)
    assert staging.take() == 3
