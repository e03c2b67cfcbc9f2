"""The index of vLLM's CPU tier: what is pinned is not evicted, and a lease is over when it is over."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.vllm.tier_index import EitherSet, TierIndex

KEYS = [bytes([number]) * 4 for number in range(8)]


def evict(index: TierIndex, wanted: int) -> list[bytes]:
    """As a policy would: the first ones that are not pinned."""
    with index.evicting() as (pinned, gone):
        gone.extend([key for key in KEYS if key in index and key not in pinned][:wanted])
    return gone


def test_a_lease_is_the_held_prefix_with_slots_and_generations() -> None:
    index = TierIndex()
    for slot, key in enumerate(KEYS[:3]):
        index.stored(key, slot + 10)
    held = index.lease("one", [KEYS[0], KEYS[1], KEYS[4], KEYS[2]])
    assert [block.slot for block in held] == [10, 11]
    assert len({block.generation for block in held}) == 2
    assert index.lease("none", [KEYS[5]]) == []
    assert not index.holds_lease("none")
    assert index.holds_lease("one")


def test_pinned_blocks_stay_until_the_last_lease_is_released() -> None:
    index = TierIndex()
    for slot, key in enumerate(KEYS[:3]):
        index.stored(key, slot)
    index.lease("one", KEYS[:2])
    index.lease("two", KEYS[:1])
    assert evict(index, 9) == [KEYS[2]]
    assert index.release("one")
    assert evict(index, 9) == [KEYS[1]]
    assert index.release("two")
    assert not index.release("two")
    assert evict(index, 9) == [KEYS[0]]
    assert len(index) == 0


def test_a_block_stored_again_has_another_generation() -> None:
    index = TierIndex()
    index.stored(KEYS[0], 3)
    first = index.lease("one", KEYS[:1])[0]
    index.stored(KEYS[0], 3)  # told twice: the same block
    assert index.lease("two", KEYS[:1])[0] == first
    index.removed(KEYS[0])
    index.stored(KEYS[0], 3)
    again = index.lease("three", KEYS[:1])[0]
    assert again.slot == first.slot
    assert again.generation != first.generation


def test_clearing_ends_leases_and_a_late_release_is_harmless() -> None:
    index = TierIndex()
    index.stored(KEYS[0], 0)
    index.lease("one", KEYS[:1])
    index.cleared()
    assert not index.holds_lease("one")
    assert index.pinned_blocks == 0
    index.stored(KEYS[0], 5)
    index.lease("two", KEYS[:1])
    assert not index.release("one")
    assert index.pinned_blocks == 1


def test_a_supply_grows_as_its_blocks_are_stored() -> None:
    index = TierIndex()
    index.stored(KEYS[0], 0)
    index.stored(KEYS[1], 1)
    assert index.pin("supply", [KEYS[0], KEYS[7]]) == 1
    assert index.pin("supply", [KEYS[1]]) == 1
    assert index.pinned_blocks == 2
    index.release("supply")
    assert index.pinned_blocks == 0


def test_what_peers_read_is_told_once() -> None:
    index = TierIndex()
    index.stored(KEYS[0], 0)
    index.lease("one", KEYS[:1])
    assert index.take_served() == [KEYS[0]]
    assert index.take_served() == []


@given(st.lists(st.tuples(st.sampled_from(["store", "lease", "release", "evict"]), st.integers(0, 7))))
def test_against_a_plain_model(steps: list[tuple[str, int]]) -> None:
    index, held, leases = TierIndex(), set[bytes](), dict[str, list[bytes]]()
    for action, number in steps:
        if action == "store":
            index.stored(KEYS[number], number)
            held.add(KEYS[number])
        elif action == "lease" and str(number) not in leases:
            prefix = [
                key for at, key in enumerate(KEYS[number:]) if set(KEYS[number : number + at + 1]) <= held
            ]
            assert len(index.lease(str(number), KEYS[number:])) == len(prefix)
            if prefix:
                leases[str(number)] = prefix
        elif action == "release":
            assert index.release(str(number)) == (leases.pop(str(number), None) is not None)
        elif action == "evict":
            held -= set(evict(index, number))
        pins = Counter(key for keys in leases.values() for key in keys)
        assert index.pinned_blocks == len(pins)
        assert set(pins) <= held
        assert len(index) == len(held)


def test_either_set() -> None:
    either = EitherSet({KEYS[0], KEYS[1]}, {KEYS[1], KEYS[2]})
    assert KEYS[2] in either
    assert KEYS[3] not in either
    assert sorted(either) == KEYS[:3]
    assert len(either) == 3
