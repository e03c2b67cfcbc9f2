"""Many blocks at once are the same as one after the other, whoever holds them before."""

from __future__ import annotations

import pytest

from epp.core.block_table import ANY_LANE, CPU_LANE, DEVICE_LANE, LANES, BlockTable
from epp.core.types import BlockKey, CacheTier

DEVICE, CPU = CacheTier.DEVICE, CacheTier.CPU


def key_list(*keys: int) -> list[BlockKey]:
    return [BlockKey(key) for key in keys]


def bits(slot: int, *lanes: int) -> int:
    return sum(1 << slot * LANES + lane for lane in (*lanes, ANY_LANE))


@pytest.mark.parametrize(
    ("before", "asked", "known"),
    [
        ([], [1, 2, 3], []),  # nobody has them
        ([(0, [1, 2, 3])], [1, 2, 3], []),  # all held alike
        ([(0, [1, 2])], [1, 2, 3], []),  # held unlike
        ([(1, [1, 2, 3])], [1, 2, 3], [1, 2, 3]),  # held by the one that asks
        ([(1, [2])], [1, 2, 3], [2]),
        ([], [1, 1], [1]),
        ([], [], []),
    ],
)
def test_a_chain_at_once(before: list[tuple[int, list[int]]], asked: list[int], known: list[int]) -> None:
    table = BlockTable()
    expected: dict[BlockKey, int] = {}
    for slot, keys in before:
        for key in key_list(*keys):
            table.hold(key, slot, DEVICE)
            expected[key] = expected.get(key, 0) | bits(slot, DEVICE_LANE)
    assert table.hold_all(key_list(*asked), 1, DEVICE) == known
    for key in key_list(*asked):
        expected[key] = expected.get(key, 0) | bits(1, DEVICE_LANE)
    table.check_integrity(expected)
    assert table.hold_all(key_list(*set(asked)), 1, CPU) == []
    table.check_integrity({k: v | bits(1, CPU_LANE) if k in asked else v for k, v in expected.items()})
