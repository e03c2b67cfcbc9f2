"""The placement tree: rules by example, the bound, and churn that leaves nothing behind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine_plugin.identity import EndpointId
from epp.core.block_table import IndexCorrupt
from epp.core.placement_tree import (
    CLAIM_BYTES,
    HOLDER_BYTES,
    KEY_BYTES,
    NODE_BYTES,
    PlacementLimits,
    PlacementTree,
)

A, B = EndpointId("a"), EndpointId("b", 1)
ONE_PROMPT_BYTES = NODE_BYTES + CLAIM_BYTES + HOLDER_BYTES


def chain(blocks: Sequence[int]) -> array[int]:
    """Keys of blocks with this content, chained as the index chains them."""
    keys, key = array("Q"), b""
    for block in blocks:
        key = blake2b(key + block.to_bytes(4, "little"), digest_size=8).digest()
        keys.append(int.from_bytes(key, "little"))
    return keys


PROMPT = chain(range(100))


def test_a_placed_prompt_matches_as_far_as_it_is_shared() -> None:
    tree = PlacementTree()
    tree.insert(PROMPT, A, 2.0)
    assert tree.match(PROMPT, 0.0) == {A: 100}
    assert tree.match(PROMPT[:7], 0.0) == {A: 7}
    assert tree.match(chain([*range(100), 5]), 0.0) == {A: 100}
    assert len(tree) == 100
    tree.check_integrity()


@pytest.mark.parametrize("shared", [0, 1, 2, 49, 98, 99, 100])
def test_every_common_length_is_found(shared: int) -> None:
    """S-C: two prompts that share only block 0 are one case of these."""
    tree = PlacementTree()
    tree.insert(PROMPT, A, 2.0)
    other = chain([*range(shared), *[7_777] * 100])
    assert tree.match(other, 0.0) == ({A: shared} if shared else {})
    tree.insert(other, B, 2.0)
    assert tree.match(other, 0.0) == ({A: shared, B: shared + 100} if shared else {B: 100})
    assert tree.match(PROMPT, 0.0) == ({A: 100, B: shared} if shared else {A: 100})
    assert len(tree) == 200
    tree.check_integrity()


def test_no_whole_block_is_no_claim() -> None:
    tree = PlacementTree()
    assert tree.insert(array("Q"), A, 2.0) is None
    assert tree.match(array("Q"), 0.0) == {}
    assert tree.claims == 0


def test_a_claim_ends_at_its_time_whether_or_not_anybody_sweeps() -> None:
    tree = PlacementTree()
    tree.insert(PROMPT, A, 2.0)
    assert tree.match(PROMPT, 1.999) == {A: 100}
    assert tree.match(PROMPT, 2.0) == {}
    assert tree.expire(1.999, 10) == 0
    assert tree.expire(2.0, 10) == 1
    assert (len(tree), tree.claims, tree.bytes) == (0, 0, 0)


def test_expiry_is_done_in_steps() -> None:
    tree = PlacementTree()
    for n in range(10):
        tree.insert(chain([1, n]), A, 1.0)
    assert [tree.expire(1.0, 4) for _ in range(4)] == [4, 4, 2, 0]
    assert len(tree) == 0


def test_placed_again_the_later_expiry_counts() -> None:
    tree = PlacementTree()
    tree.insert(PROMPT, A, 5.0)
    tree.insert(PROMPT, A, 3.0)
    assert tree.claims == 1
    assert tree.match(PROMPT, 4.0) == {A: 100}
    assert tree.expire(4.0, 10) == 0
    assert tree.expire(5.0, 10) == 1


def test_a_longer_prompt_takes_the_place_of_a_shorter_one_that_would_not_outlive_it() -> None:
    tree = PlacementTree()
    for turn in range(1, 11):
        tree.insert(PROMPT[: turn * 10], A, float(turn))
        tree.check_integrity()
    assert tree.claims == 1
    tree.insert(PROMPT[:20], A, 99.0)
    assert tree.claims == 2
    assert tree.match(PROMPT, 50.0) == {A: 20}


def test_withdrawing_ends_one_placement_only() -> None:
    tree = PlacementTree()
    first = tree.insert(chain([1, 2, 3]), A, 2.0)
    second = tree.insert(chain([1, 2, 4]), A, 2.0)
    tree.insert(chain([1, 2, 3]), B, 2.0)
    assert first is not None
    assert second is not None
    assert tree.withdraw(first, 1)
    assert not tree.withdraw(first, 1)
    assert tree.match(chain([1, 2, 3]), 0.0) == {A: 2, B: 3}
    assert tree.withdraw(second, 1)
    assert tree.match(chain([1, 2, 3]), 0.0) == {B: 3}
    tree.check_integrity()


def test_withdrawing_leaves_a_later_placement_of_the_same_prompt() -> None:
    tree = PlacementTree()
    first = tree.insert(PROMPT, A, 2.0)
    again = tree.insert(PROMPT, A, 2.0)
    assert first is not None
    assert again is not None
    assert not tree.withdraw(first, 1)
    assert tree.match(PROMPT, 1.5) == {A: 100}
    assert tree.withdraw(again, 2)
    assert tree.match(PROMPT, 0.0) == {}


def test_confirmed_claims_end() -> None:
    tree = PlacementTree()
    tree.insert(PROMPT[:40], A, 2.0)
    tree.insert(PROMPT, B, 2.0)
    tree.confirm(PROMPT, {A: 39, B: 99})
    assert tree.match(PROMPT, 0.0) == {A: 40, B: 100}
    tree.confirm(PROMPT, {A: 40, B: 99})
    assert tree.match(PROMPT, 0.0) == {B: 100}
    tree.confirm(PROMPT[:99], {B: 99})
    assert tree.match(PROMPT, 0.0) == {B: 100}
    tree.check_integrity()


def test_an_endpoint_that_leaves_takes_its_claims_along() -> None:
    tree = PlacementTree()
    tree.insert(PROMPT, A, inf)
    tree.insert(PROMPT[:50], B, inf)
    assert tree.remove_endpoint(A) == 1
    assert tree.match(PROMPT, 0.0) == {B: 50}
    assert len(tree) == 50
    assert tree.remove_endpoint(A) == 0
    tree.check_integrity()


def test_churn_of_endpoints_leaves_nothing_behind() -> None:
    """S-C07: all tables, not only the main one."""
    tree = PlacementTree()
    shared = list(range(50))
    tree.insert(chain(shared), A, inf)
    steady = None
    for n in range(1_000):
        endpoint = EndpointId(f"pod-{n}")
        for turn in range(3):
            tree.insert(chain([*shared, n, *range(turn)]), endpoint, inf if n % 2 else n + 0.5)
            tree.insert(chain([n, turn]), endpoint, n + 0.5)
        if n % 3:
            tree.remove_endpoint(endpoint)
        else:
            tree.expire(float(n + 1), 100)
            tree.remove_endpoint(endpoint)
        sizes = (len(tree), tree.claims, tree.bytes, len(tree._by_endpoint), len(tree._nodes.held))
        steady = steady or sizes
        assert sizes == steady
        assert len(tree._timers) <= 200
    tree.remove_endpoint(A)
    tables = (tree._by_endpoint, tree._timers, tree._recency, tree._nodes.held)
    assert (len(tree), tree.claims, tree.bytes, *map(len, tables)) == (0,) * 7


# --- the bound --------------------------------------------------------------------------------------


def test_when_full_the_least_recently_placed_prompt_loses_its_tail() -> None:
    room = 2 * ONE_PROMPT_BYTES + 150 * KEY_BYTES
    tree = PlacementTree(PlacementLimits(room))
    old, new = chain([1, *range(99)]), chain([2, *range(99)])
    tree.insert(old, A, inf)
    tree.insert(new, B, inf)
    assert (tree.match(old, 0.0), tree.match(new, 0.0)) == ({A: 50}, {B: 100})
    tree.insert(old[:10], A, inf)  # a shorter prompt is placed: now B's is the oldest one
    tree.insert(chain([3, *range(9)]), A, inf)
    assert tree.match(old, 0.0)[A] >= 10
    assert tree.match(new, 0.0).get(B, 0) < 100
    assert tree.bytes <= room
    tree.check_integrity()


def test_placing_a_prompt_again_makes_it_the_latest() -> None:
    tree = PlacementTree(PlacementLimits(2 * ONE_PROMPT_BYTES + 250 * KEY_BYTES))
    old, new = chain([1, *range(99)]), chain([2, *range(99)])
    tree.insert(old, A, inf)
    tree.insert(new, A, inf)
    tree.insert(old, A, inf)
    tree.insert(chain([1, *range(99), *range(500, 580)]), B, inf)  # needs room, also for its objects
    assert tree.match(old, 0.0)[A] == 100
    assert tree.match(new, 0.0).get(A, 0) < 100


def test_a_shared_head_outlives_the_tails() -> None:
    head = list(range(40))
    tree = PlacementTree(PlacementLimits(12_000))
    for n in range(60):
        tree.insert(chain([*head, *[1_000 + n] * 60]), EndpointId(f"e{n % 3}"), inf)
        assert tree.bytes <= 12_000
    tree.check_integrity()
    assert set(tree.match(chain(head), 0.0).values()) == {40}
    assert tree.match(chain([*head, *[1_059] * 60]), 0.0)[EndpointId("e2")] == 100


def test_one_endpoints_capacity_is_its_own_affair() -> None:
    """As its cache would: the tail of the prompt it got longest ago goes, shared or not."""
    tree = PlacementTree(PlacementLimits(max_blocks_per_endpoint=100))
    old, new = chain([1, *range(59)]), chain([2, *range(59)])
    tree.insert(old, A, inf)
    tree.insert(old, B, inf)
    tree.insert(new, A, inf)
    assert tree.match(old, 0.0) == {A: 40, B: 60}
    assert tree.match(new, 0.0) == {A: 60}
    assert (tree.held_blocks(A), tree.held_blocks(B), len(tree)) == (100, 60, 120)
    tree.insert(chain([3, *range(49)]), A, inf)
    assert tree.match(old, 0.0) == {B: 60}
    assert tree.match(new, 0.0) == {A: 50}
    tree.check_integrity()


def test_sessions_under_a_common_head_lose_their_tails_before_the_head() -> None:
    tree = PlacementTree(PlacementLimits(max_blocks_per_endpoint=100))
    head = list(range(40))
    for n in range(20):
        tree.insert(chain([*head, *[1_000 + n] * 25]), A, inf)
        assert tree.held_blocks(A) <= 100
    depths = [tree.match(chain([*head, *[1_000 + n] * 25]), 0.0)[A] for n in range(20)]
    assert depths == [40] * 17 + [50, 65, 65]
    tree.check_integrity()


def test_a_prompt_larger_than_the_bound_keeps_its_head() -> None:
    tree = PlacementTree(PlacementLimits(ONE_PROMPT_BYTES + 30 * KEY_BYTES))
    tree.insert(PROMPT, A, inf)
    assert tree.match(PROMPT, 0.0) == {A: 30}
    none = PlacementTree(PlacementLimits(0))
    claim = none.insert(PROMPT, A, inf)
    assert claim is not None
    assert claim.node is None
    assert (len(none), none.claims) == (0, 0)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.sampled_from([A, B])), max_size=30
    ),
    st.integers(0, 6_000),
    st.one_of(st.none(), st.integers(0, 30)),
)
def test_the_bound_holds_and_eviction_only_ever_claims_less(
    placed: list[tuple[list[int], EndpointId]], max_bytes: int, most: int | None
) -> None:
    bounded, free = PlacementTree(PlacementLimits(max_bytes, most)), PlacementTree()
    for blocks, endpoint in placed:
        keys = chain(blocks)
        bounded.insert(keys, endpoint, inf)
        free.insert(keys, endpoint, inf)
        bounded.check_integrity()
        assert bounded.bytes <= max_bytes
        assert most is None or bounded.held_blocks(endpoint) <= most
        told = free.match(keys, 0.0)
        assert all(depth <= told[e] for e, depth in bounded.match(keys, 0.0).items())
        alone = NODE_BYTES * 2 + CLAIM_BYTES * 2 + HOLDER_BYTES * 3 + KEY_BYTES * 24
        if max_bytes >= alone and (most is None or most >= len(keys)):
            assert bounded.match(keys, 0.0)[endpoint] == len(keys)


def test_integrity_is_really_checked() -> None:
    """Negative control of `check_integrity`."""
    tree = PlacementTree()
    tree.insert(PROMPT, A, 2.0)
    tree._nodes.blocks += 1
    with pytest.raises(IndexCorrupt):
        tree.check_integrity()
