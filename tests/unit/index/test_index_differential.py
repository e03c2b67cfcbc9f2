"""The compiled index against the reference: the same counts, stats and depths whatever it is told."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine_plugin.identity import EndpointId
from epp.core.engine_blocks import IndexLimits
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from epp.core.hashing import InvalidTokens
from epp.core.index_choice import COMPILED, PURE, IndexMaker, available_indexes, choose_index
from epp.core.prefix_index import Depths, PrefixIndex, PrefixQuery, PythonPrefixIndex
from epp.core.types import CacheTier, EngineBlockHash

A, B = EndpointId("a"), EndpointId("b", 1)
SEED = b"d" * 16
DEVICE, CPU = CacheTier.DEVICE, CacheTier.CPU
needs_compiled = pytest.mark.skipif(
    COMPILED not in available_indexes(), reason="the compiled index is not built here"
)

# every border of 63, 64 and 128 bits on both sides of zero; few, so that they meet again
NAMES = [0, 1, 2, 3, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 2**255]
names = st.sampled_from(NAMES).map(EngineBlockHash)
name_lists = st.lists(names, max_size=6).map(tuple)
tiers = st.sampled_from([DEVICE, CPU])
tokens = st.sampled_from([0, 1, 2, 2**32 - 1, 2**32, -1, 2**70])
good_tokens = st.sampled_from([0, 1, 2**32 - 1])
sizes = st.sampled_from([1, 2, 2, 2, 3, 0, -1, 2**31, 2**63, 2**70])
extra = st.sampled_from([None, None, None, (), ("salt",), ("lora",), (1.5,), (("picture", 3),), (b"x", -7)])


groups = st.sampled_from(
    [
        dict[str, Any](group_kind="full_attention", group_idx=number)
        for number in (None, None, 0, 0, 0, 1, -(2**70))
    ]
    + [dict(group_kind="sliding_window", group_idx=1, group_window_tokens=3)] * 4
    + [dict(group_kind="sliding_window", group_idx=2, group_window_tokens=1)]
    + [dict(group_kind="sliding_window", group_idx=number, group_window_tokens=None) for number in (None, 3)]
    + [dict(group_kind="mamba", group_idx=4)]
)


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    hashes = draw(name_lists)
    size = draw(sizes)
    fits = 0 < size < 4 and draw(st.integers(0, 9)) > 0
    count = size * len(hashes) if fits else draw(st.integers(0, 7))
    ids = draw(
        st.lists(draw(st.sampled_from([good_tokens, good_tokens, tokens])), min_size=count, max_size=count)
    )
    keys = draw(st.none() | st.lists(extra, min_size=len(hashes), max_size=len(hashes)).map(tuple))
    return BlockStored(
        draw(tiers),
        hashes,
        draw(st.none() | names),
        draw(st.sampled_from([ids, ids, ids, None])),
        size,
        lora_name=draw(st.sampled_from([None, None, "lora"])),
        extra_keys=keys,
        has_extra_keys=keys is not None or draw(st.booleans()),
        **draw(groups),
    )


removals = st.builds(BlockRemoved, tiers, name_lists, st.sampled_from([None, None, 0, 0, 1, 1, 2, 2**70]))
events = st.one_of(stores(), stores(), stores(), removals, st.just(AllBlocksCleared()))
batches = st.lists(st.tuples(st.sampled_from([A, B]), st.lists(events, max_size=4)), max_size=25)
limits = st.sampled_from(
    [
        IndexLimits(),
        IndexLimits(max_blocks=3),
        IndexLimits(max_remembered_blocks=0),
        IndexLimits(max_waiting_blocks=2, max_remembered_blocks=1),
        IndexLimits(max_waiting_bytes=8, max_remembered_blocks=2**80),
    ]
)
QUERIES = [PrefixQuery(list(p), *root) for p in [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0), (2**32 - 1, 0)]
           for root in [(None, None), ("lora", None), (None, "salt")]]  # fmt: skip


def both(bounds: IndexLimits | None = None) -> tuple[PrefixIndex, PrefixIndex]:
    makers = available_indexes()
    pair = makers[PURE](SEED, bounds), makers[COMPILED](SEED, bounds)
    for index in pair:
        index.add_endpoint(A, "model")
        index.add_endpoint(B)
    return pair


@needs_compiled
@settings(max_examples=400, deadline=None)
@given(batches, limits)
def test_hostile_events_end_in_the_same_answers(
    told: list[tuple[EndpointId, list[Event]]], bounds: IndexLimits
) -> None:
    pure, compiled = both(bounds)
    for endpoint, batch in told:
        assert compiled.apply(endpoint, batch) == pure.apply(endpoint, batch)
        compiled.check_integrity()
        for each in (A, B):
            assert compiled.stats(each) == pure.stats(each)
    for query in QUERIES:
        assert compiled.depths(query, [A, B]) == pure.depths(query, [A, B])
    for index in (pure, compiled):
        index.remove_endpoint(A)
        index.remove_endpoint(B)
        while index.sweep(2):
            index.check_integrity()
        assert isinstance(index, PythonPrefixIndex)
        assert len(index) == 0


def chain_of(names_: range, parent: int | None = None) -> BlockStored:
    hashes = tuple(EngineBlockHash(n) for n in names_)
    above = None if parent is None else EngineBlockHash(parent)
    return BlockStored(DEVICE, hashes, above, array("I", names_), 1)


def test_a_map_of_many_segments_grows_and_drains_without_losing_a_block(make_index: IndexMaker) -> None:
    """One endpoint large enough for several splits, then holes everywhere, then nothing."""
    index = make_index(SEED, IndexLimits(max_remembered_blocks=100))
    index.add_endpoint(A)
    count = 70_000
    for start in range(0, count, 1_000):
        index.apply(A, [chain_of(range(start + 1, start + 1_001), start or None)])
    query = PrefixQuery(list(range(1, count + 1)))
    assert index.depths(query, [A])[A] == Depths(count, count, 0)
    index.check_integrity()
    index.apply(A, [BlockRemoved(DEVICE, tuple(EngineBlockHash(n) for n in range(40_000, count + 1, 3)))])
    assert index.depths(query, [A])[A].blocks == 39_999
    index.check_integrity()
    index.apply(A, [BlockRemoved(DEVICE, tuple(EngineBlockHash(n) for n in range(count, 0, -1)))])
    assert index.stats(A).device_blocks == 0
    index.check_integrity()
    index.remove_endpoint(A)
    while index.sweep(30):
        pass
    index.check_integrity()
    assert isinstance(index, PythonPrefixIndex)
    assert len(index) == 0


@pytest.mark.parametrize("first_by_name", [False, True])
def test_a_hash_stored_seventy_thousand_times_is_counted_exactly(
    make_index: IndexMaker, first_by_name: bool
) -> None:
    """More copies than fit the compiled record's counter, for a known and for a waiting block."""
    index = make_index(SEED)
    index.add_endpoint(A)
    copies = 70_000
    many = BlockStored(DEVICE, (EngineBlockHash(1),) * copies, None, None, 0)
    store = chain_of(range(1, 2))
    index.apply(A, [many, store] if first_by_name else [store, many])
    gone = BlockRemoved(DEVICE, (EngineBlockHash(1),) * copies)
    assert index.apply(A, [gone]).removed_blocks == copies
    assert index.depths(PrefixQuery([1]), [A])[A].blocks == 1
    index.check_integrity()
    assert index.apply(A, [gone]).removed_blocks == 1
    assert index.depths(PrefixQuery([1]), [A])[A].blocks == 0
    index.check_integrity()


@pytest.mark.parametrize("ids", [[-1], [2**32], [2**64], ["1"], [1.5], [None], b"1234", "12", [1, [2]], 5])
def test_ids_that_no_engine_has_are_refused(make_index: IndexMaker, ids: list[int]) -> None:
    index = make_index(SEED)
    index.add_endpoint(A)
    index.apply(A, [chain_of(range(1, 5))])
    with pytest.raises(InvalidTokens):
        index.depths(PrefixQuery(ids), [A])


@pytest.mark.parametrize(
    "cast", [list, tuple, lambda ids: array("I", ids), lambda ids: memoryview(array("I", ids))]
)
def test_ids_may_come_in_any_container(make_index: IndexMaker, cast: type[list[int]]) -> None:
    index = make_index(SEED)
    index.add_endpoint(A)
    ids = [0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 1]
    hashes = tuple(EngineBlockHash(n) for n in range(6))
    index.apply(A, [BlockStored(DEVICE, hashes, None, cast(ids), 1)])
    assert index.depths(PrefixQuery(ids), [A])[A].blocks == 6
    assert index.depths(PrefixQuery(cast(ids)), [A])[A].blocks == 6


def test_a_query_may_ask_twice_and_never_for_a_stranger(make_index: IndexMaker) -> None:
    index = make_index(SEED)
    index.add_endpoint(A)
    index.apply(A, [chain_of(range(1, 5))])
    found = index.depths(PrefixQuery([1, 2]), (e for e in (A, A)))
    assert found == {A: Depths(2, 2, 0)}
    assert type(found[A]) is Depths
    assert index.depths(PrefixQuery([1, 2]), []) == {}
    assert index.depths(PrefixQuery([]), [A]) == {A: Depths()}
    with pytest.raises(KeyError):
        index.depths(PrefixQuery([1, 2]), [A, B])
    with pytest.raises(KeyError):
        index.apply(B, [])


def test_the_choice_says_which_implementation_runs() -> None:
    choice = choose_index()
    assert choice.implementation in (COMPILED, PURE)
    assert bool(choice.reason) == (choice.implementation == PURE)
    assert isinstance(choice.make(SEED), PythonPrefixIndex)


def test_an_index_that_is_not_built_is_said_and_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "epp.core._compiled_index", None)
    choice = choose_index()
    assert (choice.implementation, choice.make) == (PURE, PythonPrefixIndex)
    assert choice.reason.startswith("the compiled index cannot be loaded: ")
    assert available_indexes() == {PURE: PythonPrefixIndex}
