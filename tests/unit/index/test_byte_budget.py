"""The bound by bytes: who may grow, what is refused, and that the count is what was allocated."""

from __future__ import annotations

from array import array

import pytest

from engine_plugin.identity import EndpointId
from epp.core.byte_budget import ByteBudget
from epp.core.engine_blocks import IndexLimits
from epp.core.events import AllBlocksCleared, Applied, BlockRemoved, BlockStored
from epp.core.index_choice import IndexMaker
from epp.core.prefix_index import Depths, PrefixIndex, PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash

A, B, C = EndpointId("a"), EndpointId("b"), EndpointId("c")
BOUND = 4_000_000
STEP = 500_000  # the most that one block can add: one step of each map


def new_index(make: IndexMaker, *endpoints: EndpointId, max_bytes: int = BOUND) -> PrefixIndex:
    index = make(b"b" * 16, IndexLimits(max_bytes=max_bytes))
    for endpoint in endpoints:
        index.add_endpoint(endpoint)
    return index


def chain(start: int, stop: int, names_from: int = 1) -> BlockStored:
    """Blocks of one token, each the child of the one before."""
    hashes = tuple(EngineBlockHash(names_from + n) for n in range(start, stop))
    parent = EngineBlockHash(names_from + start - 1) if start else None
    return BlockStored(CacheTier.DEVICE, hashes, parent, array("I", range(start, stop)), 1)


def fill(index: PrefixIndex, endpoint: EndpointId, blocks: int, names_from: int = 1) -> tuple[int, int]:
    """Store a chain; (stored, refused)."""
    stored = refused = 0
    for start in range(0, blocks, 100):
        applied = index.apply(endpoint, [chain(start, start + 100, names_from)])
        stored += applied.stored_blocks
        refused += applied.refused_blocks
        assert applied.skipped_blocks == 0
    return stored, refused


def held(index: PrefixIndex, endpoint: EndpointId) -> int:
    return index.stats(endpoint).device_blocks


def test_the_index_stops_growing_at_its_bound_and_what_it_holds_stays(make_index: IndexMaker) -> None:
    index = new_index(make_index, A)
    stored, refused = fill(index, A, 200_000)
    assert refused > 10_000
    assert held(index, A) == stored
    assert index.stats(A).refused_blocks + index.stats(A).waiting_blocks == 200_000 - stored
    assert index.total_bytes <= BOUND + STEP
    index.check_integrity()
    prefix = index.depths(PrefixQuery(list(range(200_000))), [A])[A].blocks
    assert prefix > 5_000
    # more copies of what is held cost nothing and are taken
    assert index.apply(A, [chain(0, 100)]) == Applied(stored_blocks=100)


def test_an_endpoint_below_the_mean_may_grow_where_a_larger_one_may_not(make_index: IndexMaker) -> None:
    index = new_index(make_index, A, B)
    fill(index, A, 200_000)
    assert fill(index, B, 1_000, names_from=1 << 40) == (1_000, 0)
    assert index.total_bytes <= BOUND + STEP
    index.check_integrity()


def test_at_the_bound_nobody_may_grow(make_index: IndexMaker) -> None:
    index = new_index(make_index, A, B, max_bytes=1)
    assert index.apply(A, [chain(0, 10)]).refused_blocks >= 9  # the first fits an index that is empty
    assert index.apply(B, [chain(0, 10)]).stored_blocks == 0
    by_name = BlockStored(CacheTier.CPU, (EngineBlockHash(99),), None, None, 0)
    sliding = BlockStored(
        CacheTier.DEVICE, (EngineBlockHash(5),), None, None, 0, None, None, False, "sliding_window", 1, 9
    )
    assert index.apply(B, [by_name, chain(50, 52), sliding]) == Applied(refused_blocks=4)
    assert index.stats(B).waiting_blocks == 0
    index.check_integrity()


def test_what_engines_evict_makes_room(make_index: IndexMaker) -> None:
    index = new_index(make_index, A, B)
    stored, _ = fill(index, A, 200_000)
    index.apply(A, [AllBlocksCleared()])
    while index.sweep(10_000):
        pass
    assert index.total_bytes < 200_000
    assert fill(index, B, 5_000, names_from=1 << 40) == (5_000, 0)
    assert stored > 5_000


def test_bytes_come_back_when_endpoints_go(make_index: IndexMaker) -> None:
    index = new_index(make_index, A)
    first = index.total_bytes
    sizes = []
    for _ in range(30):
        for endpoint in (B, C):
            index.add_endpoint(endpoint)
            fill(index, endpoint, 2_000)
            orphan = BlockStored(
                CacheTier.DEVICE, (EngineBlockHash(1 << 50),), EngineBlockHash(1 << 51), [1], 1
            )
            index.apply(endpoint, [orphan, BlockRemoved(CacheTier.DEVICE, chain(0, 500).hashes)])
        index.check_integrity()
        for endpoint in (B, C):
            index.remove_endpoint(endpoint)
        while index.sweep(1_000):
            pass
        index.check_integrity()
        sizes.append(index.total_bytes)
    assert first == 0
    assert sizes == sizes[:1] * 30
    assert sizes[0] < 5_000


def test_every_replica_is_counted(make_index: IndexMaker) -> None:
    index = new_index(make_index, A, B)
    fill(index, A, 10_000)
    alone = index.total_bytes
    assert 25 * 10_000 < alone < 400 * 10_000
    fill(index, B, 10_000)
    assert 15 * 10_000 < index.total_bytes - alone < alone  # rows are shared
    assert index.depths(PrefixQuery([0, 1]), [B]) == {B: Depths(2, 2, 0)}


@pytest.mark.parametrize(
    ("endpoint_bytes", "own_bytes", "refused"),
    [
        (699, 699, False),
        (700, 100, False),
        (700, 349, False),
        (700, 350, True),
        (799, 10, False),
        (800, 0, True),
    ],
)
def test_the_policy(endpoint_bytes: int, own_bytes: int, refused: bool) -> None:
    """Bound 800, tight from 700, two endpoints: the mean is half of all."""
    budget = ByteBudget(800, 0, endpoint_bytes, 2)
    assert budget.refuses(own_bytes) is refused
