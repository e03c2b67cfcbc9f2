"""Plans carry every byte of every block exactly once, to the right place, in few and bounded pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin import pull_plan

SLOT_BYTES = 12
pairs = st.integers(1, 60).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 80), min_size=count, max_size=count),
        st.lists(st.integers(0, 80), min_size=count, max_size=count, unique=True),
    )
)


@given(pairs, st.integers(1, 100))
def test_every_byte_once_and_in_place(slots: tuple[list[int], list[int]], chunk_bytes: int) -> None:
    source_slots, target_slots = slots
    chunks = pull_plan.plan(source_slots, target_slots, SLOT_BYTES, chunk_bytes)
    moved = {
        segment.target + at: segment.source + at
        for chunk in chunks
        for segment in chunk.segments
        for at in range(segment.length)
    }
    wanted = {
        target * SLOT_BYTES + at: source * SLOT_BYTES + at
        for source, target in zip(source_slots, target_slots, strict=True)
        for at in range(SLOT_BYTES)
    }
    assert moved == wanted
    assert sum(chunk.total_bytes for chunk in chunks) == len(target_slots) * SLOT_BYTES


@given(pairs, st.integers(1, 100))
def test_chunks_are_full_but_for_the_last(slots: tuple[list[int], list[int]], chunk_bytes: int) -> None:
    chunks = pull_plan.plan(*slots, SLOT_BYTES, chunk_bytes)
    assert [chunk.total_bytes for chunk in chunks[:-1]] == [chunk_bytes] * (len(chunks) - 1)
    assert 0 < chunks[-1].total_bytes <= chunk_bytes
    for chunk in chunks:
        assert chunk.total_bytes == sum(segment.length for segment in chunk.segments)


@given(pairs)
def test_neighbours_on_both_sides_are_merged(slots: tuple[list[int], list[int]]) -> None:
    runs = list(pull_plan.merge(*slots, SLOT_BYTES))
    for before, after in itertools.pairwise(runs):
        joined = (before.source + before.length, before.target + before.length)
        assert joined != (after.source, after.target)


def test_one_run_is_one_descriptor_a_chunk() -> None:
    chunks = pull_plan.plan(range(100, 164), range(64), 1 << 15, 1 << 20)
    assert [len(chunk.segments) for chunk in chunks] == [1, 1]
    assert chunks[1].segments == (pull_plan.Segment((100 + 32) << 15, 32 << 15, 1 << 20),)


@pytest.mark.parametrize(
    ("source", "target", "chunk_bytes"), [([1], [1, 2], 8), ([1, 2], [3, 3], 8), ([1], [1], 0)]
)
def test_impossible_plans_are_refused(source: list[int], target: list[int], chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"slot|chunk"):
        pull_plan.plan(source, target, SLOT_BYTES, chunk_bytes)
