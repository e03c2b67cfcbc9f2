"""S-C18: a prefix counts as far as every group of the model can serve it; no rule, no claim."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from engine_plugin.identity import EndpointId
from epp.core.engine_blocks import IndexLimits
from epp.core.events import AllBlocksCleared, Applied, BlockRemoved, BlockStored, Event
from epp.core.index_choice import IndexMaker
from epp.core.prefix_index import Depths, PrefixQuery, PythonPrefixIndex
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_walk import deepest

A, B = EndpointId("a"), EndpointId("b")
DEVICE, CPU = CacheTier.DEVICE, CacheTier.CPU
SIZE, BLOCKS = 4, 10
PROMPT = list(range(100, 100 + BLOCKS * SIZE))
WINDOW = 9  # tokens: two blocks of four before the end


def full(
    start: int = 0, stop: int = BLOCKS, *, tier: CacheTier = DEVICE, group: int | None = 0
) -> BlockStored:
    return BlockStored(
        tier,
        tuple(EngineBlockHash(i + 1) for i in range(start, stop)),
        EngineBlockHash(start) if start else None,
        PROMPT[start * SIZE : stop * SIZE],
        SIZE,
        extra_keys=(None,) * (stop - start),
        has_extra_keys=True,
        group_idx=group,
    )


def sliding(
    start: int = 0,
    stop: int = BLOCKS,
    *,
    tier: CacheTier = DEVICE,
    group: int | None = 1,
    window: int | None = WINDOW,
    kind: str = "sliding_window",
) -> BlockStored:
    event = full(start, stop, tier=tier, group=group)
    return replace(event, group_kind=kind, group_window_tokens=window)


def by_name(event: BlockStored) -> BlockStored:
    return replace(event, token_ids=None, parent=None, block_size_tokens=0)


def removed(*blocks: int, tier: CacheTier = DEVICE, group: int | None = 1) -> BlockRemoved:
    return BlockRemoved(tier, tuple(EngineBlockHash(i + 1) for i in blocks), group)


def new_index(make_index: IndexMaker, *events: Event, limits: IndexLimits | None = None) -> PythonPrefixIndex:
    index = make_index(b"g" * 16, limits)
    assert isinstance(index, PythonPrefixIndex)
    index.add_endpoint(A)
    index.apply(A, events)
    index.check_integrity()
    return index


def depths(index: PythonPrefixIndex) -> Depths:
    return index.depths(PrefixQuery(PROMPT), [A])[A]


def test_a_lost_block_inside_the_window_takes_the_end_away_and_one_before_it_does_not(
    make_index: IndexMaker,
) -> None:
    index = new_index(make_index, full(), sliding())
    assert depths(index) == Depths(10, 10, 0)
    index.apply(A, [removed(*range(8))])
    assert depths(index) == Depths(10, 10, 0)  # blocks 8 and 9 are the window
    index.apply(A, [removed(8)])
    assert depths(index) == Depths()
    index.apply(A, [sliding(3, 5)])
    assert depths(index) == Depths(5, 5, 0)
    index.check_integrity()


def test_the_case_of_the_report(make_index: IndexMaker) -> None:
    """Full attention holds blocks 0 to 4, the sliding window lost block 2."""
    index = new_index(make_index, full(0, 5), sliding(0, 5), removed(2))
    assert depths(index).blocks == 5
    wide = new_index(make_index, full(0, 5), sliding(0, 5, window=13), removed(2))
    assert depths(wide).blocks == 2


@pytest.mark.parametrize(("window", "needed"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_needs_the_blocks_that_vllm_needs(make_index: IndexMaker, window: int, needed: int) -> None:
    index = new_index(make_index, full(), sliding(window=window), removed(*range(BLOCKS - needed)))
    assert depths(index).blocks == BLOCKS
    if needed:
        index.apply(A, [removed(BLOCKS - needed)])
        assert depths(index).blocks == 0


def test_a_short_prefix_needs_fewer_blocks_than_the_window(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(0, 1), sliding(0, 1, window=1_000))
    assert depths(index).blocks == 1


def test_the_full_group_still_bounds_the_prefix(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), sliding(), removed(6, group=0))
    assert depths(index).blocks == 6
    index.apply(A, [removed(5)])
    assert depths(index).blocks == 5


def test_every_sliding_group_counts(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), sliding(), sliding(group=2), removed(9), removed(7, group=2))
    assert depths(index).blocks == 7  # 10 lacks block 9 in group 1; 9 and 8 lack block 7 in group 2
    index.check_integrity()


def test_lanes_are_limited_one_by_one(make_index: IndexMaker) -> None:
    index = new_index(
        make_index,
        full(),
        full(tier=CPU),
        sliding(),
        sliding(tier=CPU),
        removed(9),
        removed(3, 8, 9, tier=CPU),
    )
    assert depths(index) == Depths(9, 9, 8)
    index.apply(A, [removed(7)])
    assert depths(index) == Depths(
        9, 7, 8
    )  # the window before 9 is there in pieces: 7 in CPU, 8 on the device


def test_copies_of_a_group_are_counted(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), sliding(), sliding(9, 10), removed(9))
    assert depths(index).blocks == 10
    index.apply(A, [removed(9)])
    assert depths(index).blocks == 9


def test_a_further_full_group_has_to_hold_the_whole_prefix(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), full(group=3), removed(4, group=3))
    assert depths(index).blocks == 4
    index.apply(A, [full(4, 5, group=3)])
    assert depths(index).blocks == 10


def test_blocks_of_a_group_are_known_by_the_names_of_the_full_group(make_index: IndexMaker) -> None:
    """Stores without tokens, before and after the full group's; S-C12 for groups."""
    before = new_index(make_index, by_name(sliding()))
    assert before.stats(A).window_blocks == 10
    before.apply(A, [full()])
    assert depths(before).blocks == 10
    before.check_integrity()
    after = new_index(make_index, full(), by_name(sliding(8, 10)))
    assert depths(after).blocks == 10


def test_a_store_whose_tokens_cover_more_than_its_blocks_goes_by_the_names(make_index: IndexMaker) -> None:
    """Blocks that have left the window are not named, but their tokens are."""
    event = replace(sliding(8, 10), token_ids=PROMPT, parent=None)
    assert depths(new_index(make_index, full(), event)).blocks == 10
    assert depths(new_index(make_index, event, full())).blocks == 10


def test_orphans_of_the_full_group_settle_their_names_in_all_groups(make_index: IndexMaker) -> None:
    index = new_index(make_index, by_name(sliding()), full(1, 10))
    assert depths(index).blocks == 0
    index.apply(A, [full(0, 1)])
    assert depths(index).blocks == 10
    index.check_integrity()


def test_a_group_finds_parents_in_its_own_blocks(make_index: IndexMaker) -> None:
    index = new_index(make_index, sliding(0, 4), sliding(4, 10), full())
    assert depths(index).blocks == 10


def test_salted_cpu_blocks_never_count_for_unsalted_prompts(make_index: IndexMaker) -> None:
    """Stock CPU events have no extra keys: only their names count, in groups, too."""
    stock = replace(sliding(tier=CPU), extra_keys=None, has_extra_keys=False)
    index = new_index(make_index, full(tier=CPU), stock)
    assert depths(index) == Depths(10, 0, 10)
    salted = replace(full(tier=CPU), extra_keys=(("salt",), *[None] * 9))
    other = new_index(make_index, salted, stock)
    assert depths(other) == Depths()
    assert other.depths(PrefixQuery(PROMPT, cache_salt="salt"), [A])[A] == Depths(10, 0, 10)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (sliding(kind="mamba"), "group_kind"),
        (sliding(kind="chunked_local_attention"), "group_kind"),
        (sliding(kind="cross_attention"), "group_kind"),
        (sliding(kind="unknown"), "group_kind"),
        (sliding(kind="future"), "group_kind"),
        (sliding(window=None), "group_window"),
        (sliding(window=0), "group_window"),
        (sliding(window=-5), "group_window"),
        (sliding(window=1 << 70), "group_window"),
        (sliding(group=None), "group_number"),
        (sliding(group=0), "group_contradiction"),
    ],
)
def test_a_group_without_a_rule_takes_every_claim_away_until_the_next_clear(
    make_index: IndexMaker, event: BlockStored, reason: str
) -> None:
    index = new_index(make_index, full())
    assert index.unsupported(A) == ""
    assert index.apply(A, [event]) == Applied(unsupported_blocks=10)
    assert depths(index) == Depths()
    assert index.unsupported(A) == index.stats(A).unsupported == reason
    index.apply(A, [removed(*range(10), group=event.group_idx), full()])
    assert index.unsupported(A) == reason
    index.apply(A, [AllBlocksCleared(), full()])
    assert index.unsupported(A) == ""
    assert depths(index).blocks == 10


def test_a_group_of_another_block_size_takes_the_claim_away(make_index: IndexMaker) -> None:
    wide = replace(sliding(), block_size_tokens=8, hashes=tuple(EngineBlockHash(900 + i) for i in range(5)))
    for events in ([full(), wide], [wide, full()]):
        index = new_index(make_index, *events)
        assert index.block_size_tokens(A) == SIZE
        assert (depths(index), index.unsupported(A)) == (Depths(), "group_block_size")


@pytest.mark.parametrize(
    "second", [sliding(window=17), sliding(kind="sliding_window_mla"), sliding(kind="mamba")]
)
def test_a_group_that_contradicts_itself_takes_the_claim_away(
    make_index: IndexMaker, second: BlockStored
) -> None:
    index = new_index(make_index, full(), sliding(), second)
    assert (depths(index), index.unsupported(A)) == (Depths(), "group_contradiction")


def test_a_group_of_which_only_removals_were_heard_is_there_until_a_store_tells_its_kind(
    make_index: IndexMaker,
) -> None:
    index = new_index(make_index, full(), removed(3))
    assert (depths(index), index.unsupported(A)) == (Depths(), "group_kind")
    assert index.stats(A).device_blocks == 10
    index.apply(A, [sliding(8, 10)])
    assert (depths(index).blocks, index.unsupported(A)) == (10, "")


def test_an_engine_without_group_numbers_in_its_stores_has_one_group(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(group=None), removed(9, group=0))
    assert (depths(index).blocks, index.unsupported(A)) == (9, "")


def test_more_groups_than_any_model_has_end_the_claim(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), *[sliding(group=n) for n in range(1, 65)])
    assert depths(index).blocks == 10
    assert index.apply(A, [sliding(group=65)]).unsupported_blocks == 10
    assert (depths(index), index.unsupported(A)) == (Depths(), "group_number")
    index.apply(A, [removed(*range(10), group=66), sliding(group=66)])
    index.check_integrity()


def test_clears_and_replacements_leave_nothing_of_a_group_behind(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), sliding(), by_name(sliding(group=2)))
    assert index.stats(A).window_blocks == 20
    for _ in range(3):
        index.apply(A, [AllBlocksCleared(), sliding()])
    assert index.stats(A).window_blocks == 10
    index.remove_endpoint(A)
    while index.sweep(100):
        pass
    index.check_integrity()
    assert index._table.budget.endpoint_bytes == 0


def test_awaited_blocks_are_bounded(make_index: IndexMaker) -> None:
    limits = IndexLimits(max_waiting_blocks=3)
    index = new_index(make_index, by_name(sliding()), full(), limits=limits)
    assert index.stats(A).forgotten_waiting_blocks == 7
    assert index.stats(A).window_blocks == 3
    assert depths(index).blocks == 10  # the last three are the window


def test_blocks_of_all_groups_are_bounded_and_counted(make_index: IndexMaker) -> None:
    index = new_index(make_index, limits=IndexLimits(max_blocks=10))
    applied = index.apply(A, [full(), sliding(0, 6), sliding(0, 6, group=2)])
    assert applied == Applied(stored_blocks=10, windowed_blocks=10, skipped_blocks=2)


def test_other_endpoints_are_untouched(make_index: IndexMaker) -> None:
    index = new_index(make_index, full(), sliding(), removed(9))
    index.add_endpoint(B)
    index.apply(B, [full(0, 7)])
    found = index.depths(PrefixQuery(PROMPT), [A, B, A])
    assert found == {A: Depths(9, 9, 0), B: Depths(7, 7, 0)}


def brute_force(keys: Sequence[int], depth: int, held: list[set[BlockKey]], needed: list[int]) -> int:
    def fits(end: int) -> bool:
        windows = [keys[max(0, end - count) : end] for count in needed]
        return all(blocks.issuperset(window) for blocks, window in zip(held, windows, strict=True))

    return max(end for end in range(depth + 1) if fits(end))


@given(
    st.integers(0, 40),
    st.lists(
        st.tuples(st.sets(st.integers(0, 39).map(BlockKey)), st.sampled_from([0, 1, 2, 3, 9, 1 << 62])),
        min_size=1,
        max_size=4,
    ),
)
def test_the_walk_finds_the_deepest_prefix(depth: int, groups: list[tuple[set[BlockKey], int]]) -> None:
    keys = [BlockKey(i) for i in range(40)]
    # mostly full, so that prefixes go deep
    held = [set(keys) - lost for lost, _ in groups]
    needed = [count for _, count in groups]
    assert deepest(keys, depth, held, needed) == brute_force(keys, depth, held, needed)


def test_groups_that_disagree_at_every_block_cost_one_pass() -> None:
    """Each group takes the other's answer down by one block, for ever: the pass from below decides."""
    keys = [BlockKey(i) for i in range(500)]
    even, odd = set(keys[::2]), set(keys[1::2])
    assert deepest(keys, 500, [even, odd], [1, 1]) == 0
    assert deepest(keys, 500, [even | set(keys[:5]), odd | set(keys[:5])], [1, 1]) == 5
