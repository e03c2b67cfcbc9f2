"""Rules of the index that a random walk would meet too rarely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest

from engine_plugin.identity import EndpointId
from epp.core.block_table import IndexCorrupt
from epp.core.engine_blocks import IndexLimits
from epp.core.events import AllBlocksCleared, Applied, BlockRemoved, BlockStored
from epp.core.index_choice import IndexMaker
from epp.core.prefix_index import Depths, PrefixQuery, PythonPrefixIndex
from epp.core.types import CacheTier, EngineBlockHash

A, B = EndpointId("a"), EndpointId("b")
DEVICE, CPU = CacheTier.DEVICE, CacheTier.CPU
SIZE = 4
PROMPT = list(range(100, 100 + 10 * SIZE))


class IndexOf(Protocol):
    def __call__(self, *endpoints: EndpointId, limits: IndexLimits | None = None) -> PythonPrefixIndex: ...


@pytest.fixture
def index_of(make_index: IndexMaker) -> IndexOf:
    """Make an index with some endpoints, of the implementation under test."""

    def make(*endpoints: EndpointId, limits: IndexLimits | None = None) -> PythonPrefixIndex:
        index = make_index(b"s" * 16, limits)
        assert isinstance(index, PythonPrefixIndex)
        for endpoint in endpoints or (A,):
            index.add_endpoint(endpoint)
        return index

    return make


def stored(
    start: int = 0,
    stop: int = 10,
    *,
    tier: CacheTier = DEVICE,
    tokens: Sequence[int] = PROMPT,
    extra: tuple[tuple[object, ...] | None, ...] | None = None,
    lora: str | None = None,
    kind: str = "full_attention",
    group: int | None = None,
    size: int = SIZE,
) -> BlockStored:
    """Blocks [start, stop) of a prompt, named 1, 2, 3..."""
    return BlockStored(
        tier,
        tuple(EngineBlockHash(i + 1) for i in range(start, stop)),
        EngineBlockHash(start) if start else None,
        tokens[start * size : stop * size],
        size,
        lora_name=lora,
        extra_keys=extra,
        has_extra_keys=extra is not None,
        group_kind=kind,
        group_idx=group,
    )


def by_name(start: int, stop: int, tier: CacheTier = CPU) -> BlockStored:
    return BlockStored(tier, tuple(EngineBlockHash(i + 1) for i in range(start, stop)), None, None, 0)


def removed(*blocks: int, tier: CacheTier = DEVICE, group: int | None = None) -> BlockRemoved:
    return BlockRemoved(tier, tuple(EngineBlockHash(i + 1) for i in blocks), group)


def depths(index: PythonPrefixIndex, endpoint: EndpointId = A, **root: str) -> Depths:
    return index.depths(PrefixQuery(PROMPT, **root), [endpoint])[endpoint]


def test_a_hole_ends_the_prefix_and_its_refill_restores_the_depth(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored()])
    index.apply(A, [removed(5)])
    assert depths(index) == Depths(5, 5, 0)
    index.apply(A, [stored(5, 6)])
    assert depths(index) == Depths(10, 10, 0)


def test_tiers_are_ored_block_by_block(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(), by_name(0, 3), by_name(5, 10), removed(2, 5, 6)])
    assert depths(index) == Depths(10, 2, 3)


def test_a_hash_stored_twice_and_removed_once_is_still_held(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(), stored(0, 1), removed(0)])
    assert depths(index).blocks == 10
    index.apply(A, [removed(0)])
    assert depths(index).blocks == 0


def test_orphans_wait_for_their_parents_and_then_all_count(index_of: IndexOf) -> None:
    """S-C08, and the scrambled order of CPU-tier events."""
    index = index_of()
    children = [stored(i, i + 1) for i in (9, 3, 7, 2, 8, 1, 6, 4, 5)]
    applied = index.apply(A, children)
    assert applied == Applied(orphan_blocks=9)
    assert depths(index).blocks == 0
    assert index.stats(A).waiting_blocks == 9
    assert index.apply(A, [stored(0, 1)]).stored_blocks == 10
    assert depths(index).blocks == 10
    assert index.stats(A).waiting_blocks == 0


def test_a_waiting_block_that_was_removed_does_not_come_back(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(1, 5), removed(2), stored(0, 1)])
    assert depths(index).blocks == 2


def test_token_less_stores_count_for_known_names_and_wait_for_unknown_ones(index_of: IndexOf) -> None:
    """S-C12: block size 0 and no tokens."""
    index = index_of()
    applied = index.apply(A, [stored(0, 4), by_name(0, 6)])
    assert (applied.stored_blocks, applied.unresolved_blocks) == (8, 2)
    assert depths(index) == Depths(4, 4, 4)
    index.apply(A, [removed(5, tier=CPU), stored(4, 10)])
    assert depths(index) == Depths(10, 10, 5)


def test_cpu_tokens_without_extra_keys_never_make_a_claim_of_their_own(index_of: IndexOf) -> None:
    """Stock engines leave the salt out of CPU events: salted content must not look unsalted."""
    index = index_of()
    assert index.apply(A, [stored(tier=CPU)]) == Applied(unresolved_blocks=10)
    assert depths(index).blocks == 0
    salted = (("tenant",), *[None] * 9)
    index.apply(A, [stored(extra=salted)])
    assert depths(index).blocks == 0
    assert depths(index, cache_salt="tenant") == Depths(10, 10, 10)
    assert depths(index, cache_salt="other").blocks == 0


def test_cpu_tokens_with_extra_keys_are_enough(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(tier=CPU, extra=(None,) * 10)])
    assert depths(index) == Depths(10, 0, 10)


def test_adapter_blocks_serve_that_adapter_only(index_of: IndexOf) -> None:
    """S-C11: the adapter's name also stands in the extra keys."""
    index = index_of(A, B)
    index.apply(A, [stored(lora="tuned", extra=(("tuned",),) * 10)])
    index.apply(B, [stored()])
    assert depths(index, A, lora_name="tuned").blocks == 10
    assert depths(index, A).blocks == 0
    assert depths(index, B, lora_name="tuned").blocks == 0
    assert depths(index, B).blocks == 10


def test_pictures_change_the_key_from_their_block_on(index_of: IndexOf) -> None:
    index = index_of()
    extra = (None, None, (("picture", 0),), *[None] * 7)
    index.apply(A, [stored(extra=extra)])
    assert depths(index).blocks == 2


def test_an_unknown_extra_key_ends_the_claim(index_of: IndexOf) -> None:
    index = index_of()
    extra = (None, None, (1.5,), *[None] * 7)
    applied = index.apply(A, [stored(extra=extra)])
    assert (applied.stored_blocks, applied.skipped_blocks) == (2, 8)
    assert index.apply(A, [by_name(3, 4)]).unresolved_blocks == 1


@pytest.mark.parametrize(
    "event",
    [
        stored(tokens=PROMPT[:-1]),
        stored(extra=(None,)),
        BlockStored(DEVICE, (EngineBlockHash(1),), None, [1, 2], 0),
        BlockStored(DEVICE, (), None, [1, 2], 2),
        BlockStored(DEVICE, (EngineBlockHash(1),), None, [-5], 1),
    ],
)
def test_numbers_that_do_not_fit_together_are_skipped(index_of: IndexOf, event: BlockStored) -> None:
    index = index_of()
    assert index.apply(A, [event]) == Applied(skipped_blocks=len(event.hashes))
    index.check_integrity()


def test_several_block_sizes_live_side_by_side(index_of: IndexOf) -> None:
    index = index_of(A, B)
    index.apply(A, [stored()])
    index.apply(B, [stored(0, 5, size=8)])
    found = index.depths(PrefixQuery(PROMPT), [A, B])
    assert (found[A].blocks, found[B].blocks) == (10, 5)
    assert (index.block_size_tokens(A), index.block_size_tokens(B)) == (4, 8)


def test_an_endpoint_has_one_block_size_until_it_is_cleared(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(0, 2)])
    other = BlockStored(DEVICE, (EngineBlockHash(77),), None, PROMPT[:8], 8)
    assert index.apply(A, [other]).skipped_blocks == 1
    index.apply(A, [AllBlocksCleared(), other])
    assert (depths(index).blocks, index.block_size_tokens(A)) == (1, 8)


def test_models_do_not_share_blocks(index_of: IndexOf) -> None:
    index = index_of()
    index.add_endpoint(B, model="other")
    index.apply(A, [stored()])
    index.apply(B, [stored()])
    index.check_integrity()
    assert len(index) == 20


def test_clear_is_at_once_and_the_slot_is_not_reused_before_it_is_swept(index_of: IndexOf) -> None:
    index = index_of(A, B)
    long = list(range(4 * 2_000))
    index.apply(A, [stored(0, 2_000, tokens=long)])
    index.clear(A)
    index.remove_endpoint(B)
    index.add_endpoint(B)
    elsewhere = BlockStored(DEVICE, (EngineBlockHash(9_999),), None, [1, 2, 3, 4], SIZE)
    index.apply(A, [elsewhere])  # so that the walk really looks for A and B
    index.apply(B, [elsewhere])
    query = PrefixQuery(long)
    assert index.depths(query, [A, B]) == {A: Depths(), B: Depths()}
    index.check_integrity()
    assert index.sweep(0) > 1_500
    while index.sweep(300):
        assert index.depths(query, [A, B]) == {A: Depths(), B: Depths()}
        index.check_integrity()
    assert len(index) == 1


def test_endpoints_that_come_and_go_leave_nothing_behind(index_of: IndexOf) -> None:
    """S-C07: all tables, not only the main one, stay as small as after the first round."""
    index = index_of(A)
    for round_ in range(300):
        endpoint = EndpointId(f"pod-{round_}")
        index.add_endpoint(endpoint)
        index.apply(endpoint, [stored(), stored(), by_name(0, 10), by_name(20, 25), removed(4)])
        index.remove_endpoint(endpoint)
    index.sweep(1_000)
    index.check_integrity()
    assert len(index) == 0
    assert index._slots.count <= 4
    assert index._table.sets == 0
    assert not index._cleared


def test_waiting_and_remembered_blocks_are_bounded(index_of: IndexOf) -> None:
    limits = IndexLimits(max_waiting_blocks=5, max_waiting_bytes=1_000, max_remembered_blocks=3)
    index = index_of(limits=limits)
    index.apply(A, [stored(1, 10), by_name(50, 60)])
    index.check_integrity()
    stats = index.stats(A)
    assert (stats.waiting_blocks, stats.forgotten_waiting_blocks) == (5, 14)
    index.apply(A, [stored()])
    index.apply(A, [removed(*range(10))])
    index.check_integrity()
    assert depths(index).blocks == 0
    assert index.apply(A, [by_name(7, 10)]).stored_blocks == 3  # the last three names are remembered
    assert index.apply(A, [by_name(0, 7)]).unresolved_blocks == 7


def test_a_remembered_name_stays_what_it_was_when_it_is_stored_with_another_content(
    index_of: IndexOf,
) -> None:
    index = index_of()
    index.apply(A, [stored(), removed(*range(10))])
    applied = index.apply(A, [stored(tokens=PROMPT[::-1])])
    assert (applied.stored_blocks, applied.skipped_blocks) == (0, 10)
    index.check_integrity()
    assert index.apply(A, [stored()]).stored_blocks == 10
    assert depths(index).blocks == 10


def test_one_name_for_two_blocks_of_an_event_means_the_first(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(0, 1)])
    names = (EngineBlockHash(2), EngineBlockHash(2), EngineBlockHash(3))
    event = BlockStored(DEVICE, names, EngineBlockHash(1), PROMPT[SIZE : 4 * SIZE], SIZE)
    applied = index.apply(A, [event])
    assert (applied.stored_blocks, applied.skipped_blocks) == (2, 1)
    index.check_integrity()
    assert depths(index).blocks == 2
    assert index.apply(A, [BlockRemoved(DEVICE, names)]).removed_blocks == 2
    index.check_integrity()
    assert depths(index).blocks == 1


def test_nothing_need_be_remembered(index_of: IndexOf) -> None:
    """A waiting block without copies settles while no block without copies may be kept."""
    index = index_of(limits=IndexLimits(max_remembered_blocks=0))
    index.apply(A, [stored(1, 3), removed(1), removed(2)])
    assert (
        index.apply(A, [BlockStored(DEVICE, (EngineBlockHash(2),), None, PROMPT[:4], SIZE)]).stored_blocks
        == 1
    )
    index.check_integrity()
    assert depths(index).blocks == 1
    index.apply(A, [removed(1)])
    assert depths(index).blocks == 0
    assert index.apply(A, [by_name(1, 2)]).unresolved_blocks == 1
    index.check_integrity()


def test_waiting_blocks_are_bounded_in_bytes(index_of: IndexOf) -> None:
    index = index_of(limits=IndexLimits(max_waiting_bytes=4 * SIZE * 3))
    index.apply(A, [stored(1, 10)])
    assert index.stats(A).waiting_blocks == 3
    index.check_integrity()


def test_a_full_endpoint_claims_no_more(index_of: IndexOf) -> None:
    index = index_of(limits=IndexLimits(max_blocks=4))
    applied = index.apply(A, [stored()])
    assert (applied.stored_blocks, applied.skipped_blocks) == (4, 6)
    assert depths(index).blocks == 4


def test_one_name_for_two_contents_keeps_the_first(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored(0, 1)])
    other = BlockStored(DEVICE, (EngineBlockHash(1),), None, [5, 6, 7, 8], SIZE)
    assert index.apply(A, [other]).skipped_blocks == 1
    assert index.depths(PrefixQuery([5, 6, 7, 8]), [A])[A].blocks == 0
    index.apply(A, [removed(0)])
    assert depths(index).blocks == 0


def test_two_names_for_one_content_both_have_to_go(index_of: IndexOf) -> None:
    """An engine that changed its hashing without a restart that we saw."""
    index = index_of()
    other = BlockStored(DEVICE, (EngineBlockHash(901), EngineBlockHash(902)), None, PROMPT[:8], SIZE)
    index.apply(A, [stored(0, 2), other, removed(0, 1)])
    index.check_integrity()
    assert depths(index).blocks == 2
    index.apply(A, [removed(900)])
    assert depths(index).blocks == 0


def test_a_removal_from_a_tier_that_never_held_the_block_is_ignored(index_of: IndexOf) -> None:
    index = index_of()
    assert index.apply(A, [stored(0, 2), removed(0, 1, tier=CPU)]).removed_blocks == 0
    index.check_integrity()
    index.apply(A, [by_name(0, 2)])
    assert depths(index) == Depths(2, 2, 2)


def test_a_walk_stops_at_a_block_that_nobody_holds(index_of: IndexOf) -> None:
    index = index_of(A, B)
    for endpoint in (A, B):
        index.apply(endpoint, [stored(), removed(4)])
    assert depths(index, A).blocks == depths(index, B).blocks == 4


def test_a_chain_that_bites_its_tail_waits_for_ever_within_the_bound(index_of: IndexOf) -> None:
    index = index_of()
    loop = [
        BlockStored(DEVICE, (EngineBlockHash(1),), EngineBlockHash(2), [1, 2, 3, 4], SIZE),
        BlockStored(DEVICE, (EngineBlockHash(2),), EngineBlockHash(1), [1, 2, 3, 4], SIZE),
        BlockStored(DEVICE, (EngineBlockHash(3),), EngineBlockHash(3), [1, 2, 3, 4], SIZE),
    ]
    assert index.apply(A, loop).orphan_blocks == 3
    index.apply(A, [BlockStored(DEVICE, (EngineBlockHash(1),), None, [1, 2, 3, 4], SIZE)])
    index.check_integrity()
    assert index.stats(A).waiting_blocks == 1
    assert index.depths(PrefixQuery([1, 2, 3, 4] * 3), [A])[A].blocks == 2


def test_holders_are_not_limited_in_number(index_of: IndexOf) -> None:
    many = [EndpointId("pod", rank) for rank in range(300)]
    index = index_of(*many)
    for rank, endpoint in enumerate(many):
        index.apply(endpoint, [stored(0, 1 + rank % 10)])
    found = index.depths(PrefixQuery(PROMPT), many)
    assert [found[e].blocks for e in many] == [1 + rank % 10 for rank in range(300)]
    index.check_integrity()


@pytest.mark.parametrize("token_less", [True, False])
def test_waiting_blocks_count_against_the_bound_of_an_endpoint(index_of: IndexOf, token_less: bool) -> None:
    """Found by reading: orphans came on top of the bound, and stayed there once their parent was known."""
    index = index_of(limits=IndexLimits(max_blocks=6))
    index.apply(A, [stored(0, 4)])
    late = BlockStored(CacheTier.CPU, tuple(EngineBlockHash(50 + n) for n in range(4)), None, None, SIZE)
    orphans = late if token_less else stored(5, 9)
    applied = index.apply(A, [orphans])
    assert (applied.skipped_blocks, applied.unresolved_blocks + applied.orphan_blocks) == (2, 2)
    again = index.apply(A, [orphans])  # a further copy of those that wait is no further block
    assert (again.skipped_blocks, again.unresolved_blocks + again.orphan_blocks) == (2, 2)
    index.apply(A, [stored(4, 5)])
    held = index.stats(A)
    assert held.device_blocks + held.waiting_blocks <= 6
    index.check_integrity()


def test_corruption_is_found(index_of: IndexOf) -> None:
    index = index_of()
    index.apply(A, [stored()])
    assert index._endpoints[A].blocks.sweep(1) == 1  # as for a cleared endpoint: its counts stay
    with pytest.raises(IndexCorrupt):
        index.check_integrity()
