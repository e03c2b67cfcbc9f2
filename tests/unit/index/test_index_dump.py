"""Dump and restore: the restored endpoint answers alike and goes on alike; anything else is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from engine_plugin.identity import EndpointId
from epp.core.engine_blocks import IndexLimits
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from epp.core.index_choice import IndexMaker
from epp.core.index_dump import DumpRefused, EndpointDump, GroupDump
from epp.core.prefix_index import Depths, PrefixIndex, PrefixQuery, PythonPrefixIndex
from epp.core.types import CacheTier, EngineBlockHash
from tests.unit.index.test_index_differential import QUERIES, events

A, B = EndpointId("a"), EndpointId("b", 1)
SEED = b"e" * 16
DEVICE, CPU = CacheTier.DEVICE, CacheTier.CPU


def new_index(make: IndexMaker, limits: IndexLimits | None = None, seed: bytes = SEED) -> PrefixIndex:
    index = make(seed, limits)
    for endpoint in (A, B):
        index.add_endpoint(endpoint, "model")
    return index


def chain(start: int, stop: int, *, tier: CacheTier = DEVICE, kind: str = "full_attention") -> BlockStored:
    """Blocks of one token, named 1, 2, 3..."""
    return BlockStored(
        tier,
        tuple(EngineBlockHash(i + 1) for i in range(start, stop)),
        EngineBlockHash(start) if start else None,
        list(range(start, stop)),
        1,
        has_extra_keys=True,
        group_kind=kind,
        group_idx=0 if kind == "full_attention" else 1,
        group_window_tokens=None if kind == "full_attention" else 3,
    )


def removed(*names: int, tier: CacheTier = DEVICE, group: int = 0) -> BlockRemoved:
    return BlockRemoved(tier, tuple(EngineBlockHash(name) for name in names), group)


def depth(index: PrefixIndex, endpoint: EndpointId = A, blocks: int = 20) -> Depths:
    return index.depths(PrefixQuery(list(range(blocks))), [endpoint])[endpoint]


def dumped(make: IndexMaker, *told: Event, limits: IndexLimits | None = None) -> EndpointDump:
    index = new_index(make, limits)
    index.apply(A, told)
    return index.dump(A)


def refused(make: IndexMaker, dump: EndpointDump, limits: IndexLimits | None = None) -> str:
    """The reason, after checking that the endpoint is empty and as good as new."""
    index = new_index(make, limits)
    before = index.total_bytes
    with pytest.raises(DumpRefused) as error:
        index.restore(A, dump)
    while index.sweep(1_000):
        pass
    index.check_integrity()
    assert index.stats(A) == index.stats(B)
    assert index.total_bytes - before < 10_000
    index.apply(A, [chain(0, 3)])
    assert depth(index).blocks == 3
    return error.value.reason


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(events, max_size=12),
    st.lists(events, max_size=12),
    st.sampled_from(
        [IndexLimits(), IndexLimits(max_remembered_blocks=2), IndexLimits(max_remembered_blocks=0)]
    ),
)
def test_a_restored_endpoint_answers_and_goes_on_like_the_dumped_one(
    make_index: IndexMaker, before: list[Event], after: list[Event], limits: IndexLimits
) -> None:
    index = new_index(make_index, limits)
    index.apply(A, before)
    dump = index.dump(A)
    other = new_index(make_index, limits)
    other.apply(B, before)  # somebody else's claims are in the table already
    other.restore(A, dump)
    other.check_integrity()
    again = other.dump(A)
    assert sorted_columns(again) == sorted_columns(dump)
    assert all(other.depths(query, [A]) == index.depths(query, [A]) for query in QUERIES)
    if not dump.complete:
        return
    assert comparable(other) == comparable(index)
    for event in after:
        assert other.apply(A, [event]) == index.apply(A, [event])
        other.check_integrity()
        assert all(other.depths(query, [A]) == index.depths(query, [A]) for query in QUERIES)
    assert comparable(other) == comparable(index)


def comparable(index: PrefixIndex) -> object:
    """Stats without the counters of the past, which no dump carries."""
    return replace(index.stats(A), forgotten_waiting_blocks=0, refused_blocks=0)


def sorted_columns(dump: EndpointDump) -> object:
    def rows(of: EndpointDump | GroupDump) -> list[tuple[int, int, int, int]]:
        count = len(of.names) // 8
        columns = [struct.unpack(f"<{count}Q", of.names), struct.unpack(f"<{count}Q", of.keys)]
        columns += [struct.unpack(f"<{count}H", of.device_copies), struct.unpack(f"<{count}H", of.cpu_copies)]
        return sorted(zip(*columns, strict=True))

    groups = [
        (g.group_idx, g.kind, g.window_tokens, g.block_size_tokens, g.refusal, rows(g)) for g in dump.groups
    ]
    return rows(dump), groups, dump.model, dump.block_size_tokens, dump.main_group, dump.scheme


def test_children_copies_and_remembered_blocks_survive(make_index: IndexMaker) -> None:
    index = new_index(make_index)
    dump = dumped(
        make_index, chain(0, 5), chain(0, 5), chain(0, 2, tier=CPU), chain(5, 8), removed(6, 7), removed(8)
    )
    assert (dump.complete, dump.blocks, dump.model, dump.block_size_tokens) == (True, 8, "model", 1)
    index.restore(A, dump)
    assert depth(index) == Depths(5, 5, 2)
    index.apply(A, [removed(*range(1, 6))])
    assert depth(index).blocks == 5  # one of two copies
    index.apply(A, [removed(*range(3, 6))])
    assert depth(index) == Depths(2, 2, 2)
    # children of held and of remembered blocks, and a remembered block by its name
    assert index.apply(A, [chain(8, 10)]).stored_blocks == 2
    named = BlockStored(CPU, tuple(EngineBlockHash(n) for n in range(3, 9)), None, None, 0)
    assert index.apply(A, [named]).stored_blocks == 6
    assert depth(index) == Depths(10, 2, 8)
    index.check_integrity()


def test_remembered_blocks_are_forgotten_in_the_same_order(make_index: IndexMaker) -> None:
    limits = IndexLimits(max_remembered_blocks=3)
    index = new_index(make_index, limits)
    index.restore(A, dumped(make_index, chain(0, 6), removed(3, 1, 5), limits=limits))
    index.apply(A, [removed(2)])
    known = [
        index.apply(A, [BlockStored(DEVICE, (EngineBlockHash(n),), None, None, 0)]) for n in (3, 1, 5, 2)
    ]
    assert [applied.stored_blocks for applied in known] == [0, 1, 1, 1]


@pytest.mark.parametrize("copies", [1, 0x7FFF, 0x8000, 0xFFFF])
def test_many_copies_are_counted_exactly(make_index: IndexMaker, copies: int) -> None:
    index = new_index(make_index)
    many = BlockStored(DEVICE, (EngineBlockHash(1),) * copies, None, [7] * copies, 1)
    dump = dumped(make_index, chain(0, 1), structs.replace(many, token_ids=None))
    assert dump.complete == (copies < 0xFFFF)
    index.restore(A, dump)
    index.check_integrity()
    gone = BlockRemoved(DEVICE, (EngineBlockHash(1),) * (0xFFFF + 2), 0)
    assert index.apply(A, [gone]).removed_blocks == min(copies + 1, 0xFFFF)
    assert depth(index).blocks == 0


@pytest.mark.parametrize(
    "waiting",
    [
        chain(9, 10),
        BlockStored(CPU, (EngineBlockHash(99),), None, None, 0),
        structs.replace(chain(8, 9, kind="sliding_window"), token_ids=None),
    ],
)
def test_what_waits_is_left_out_and_said(make_index: IndexMaker, waiting: BlockStored) -> None:
    dump = dumped(make_index, chain(0, 3), waiting)
    assert (dump.complete, dump.blocks) == (False, 3)
    index = new_index(make_index)
    index.restore(A, dump)
    assert index.stats(A).waiting_blocks == 0
    index.check_integrity()


def test_groups_survive(make_index: IndexMaker) -> None:
    sliding = chain(0, 10, kind="sliding_window")
    dump = dumped(make_index, chain(0, 10), sliding, removed(8, group=1))
    assert dump.complete
    assert [(g.group_idx, g.kind, g.window_tokens, g.block_size_tokens) for g in dump.groups] == [
        (1, "sliding_window", 3, 1)
    ]
    index = new_index(make_index)
    index.restore(A, dump)
    assert depth(index).blocks == 10
    index.apply(A, [removed(10, group=1)])
    assert depth(index).blocks == 7
    index.apply(A, [chain(10, 12), chain(10, 12, kind="sliding_window")])
    assert depth(index).blocks == 12
    index.check_integrity()


def test_an_endpoint_without_a_rule_stays_without_a_claim(make_index: IndexMaker) -> None:
    index = new_index(make_index)
    index.restore(A, dumped(make_index, chain(0, 10), chain(0, 10, kind="mamba")))
    assert (depth(index), index.unsupported(A)) == (Depths(), "group_kind")
    index.apply(A, [AllBlocksCleared(), chain(0, 10)])
    assert depth(index).blocks == 10


def test_an_empty_endpoint_has_an_empty_dump(make_index: IndexMaker) -> None:
    dump = dumped(make_index)
    assert (dump.complete, dump.blocks, dump.groups) == (True, 0, ())
    index = new_index(make_index)
    index.restore(A, dump)
    assert index.stats(A) == index.stats(B)


def test_steps_keep_a_loop_free_and_end_in_the_same_state(make_index: IndexMaker) -> None:
    dump = dumped(make_index, chain(0, 10), chain(0, 10, kind="sliding_window"))
    index = new_index(make_index)
    assert list(index.restore_steps(A, dump, 4)) == [4, 8, 10]
    assert sorted_columns(index.dump(A)) == sorted_columns(dump)


@pytest.mark.parametrize("change", ["events", "clear", "remove"])
def test_a_dump_in_steps_tells_what_was_held_when_it_began(make_index: IndexMaker, change: str) -> None:
    index = new_index(make_index)
    index.apply(A, [chain(0, 10), BlockRemoved(DEVICE, chain(0, 10).hashes[8:])])
    before = index.dump(A)
    steps = index.dump_steps(A, 2)
    assert next(steps) is None
    if change == "events":
        index.apply(A, [BlockRemoved(DEVICE, chain(0, 10).hashes[:5]), chain(10, 40)])
    elif change == "clear":
        index.clear(A)
        index.sweep(100)
    else:
        index.remove_endpoint(A)
    *nothing, dump = steps
    assert not any(nothing)
    assert dump == before
    index.check_integrity()


def test_a_step_of_a_dump_is_bounded_by_blocks(make_index: IndexMaker) -> None:
    index = new_index(make_index)
    index.apply(A, [chain(0, 1_000)])
    *steps, dump = index.dump_steps(A, 50)
    assert len(steps) >= 1_000 // 50 - 1  # a step may look at a few places more than asked for
    assert dump is not None
    assert dump.blocks == 1_000


@pytest.mark.parametrize("gone", [True, False])
def test_a_restore_that_is_overtaken_stops(make_index: IndexMaker, gone: bool) -> None:
    index = new_index(make_index)
    steps = index.restore_steps(A, dumped(make_index, chain(0, 10)), 4)
    next(steps)
    if gone:
        index.remove_endpoint(A)
    else:
        index.clear(A)
        index.apply(A, [chain(0, 2)])
    with pytest.raises(DumpRefused, match="overtaken"):
        next(steps)
    index.check_integrity()
    assert gone or depth(index).blocks == 2


def test_a_large_dump_is_not_taken_over_in_the_order_of_the_map(make_index: IndexMaker) -> None:
    """Filled in another map's order, a map of the same secrets takes quadratic time: minutes here."""
    count = 300_000 if make_index is not PythonPrefixIndex else 3_000
    index = new_index(make_index)
    index.apply(A, [chain(n, n + 1_000) for n in range(0, count, 1_000)])
    dump = index.dump(A)
    index.clear(A)
    while index.sweep(count):
        pass
    index.restore(A, dump)
    assert depth(index, blocks=count).blocks == count
    assert index.dump(A).blocks == count


def test_two_names_of_one_content_are_swept_one_by_one(make_index: IndexMaker) -> None:
    """Found by the state machine: half swept, the other name's claim was gone from the table."""
    index = new_index(make_index)
    index.apply(A, [chain(0, 1), BlockStored(CPU, (EngineBlockHash(77),), None, [0], 1, has_extra_keys=True)])
    index.clear(A)
    while index.sweep(1):
        index.check_integrity()


def test_only_an_empty_endpoint_takes_a_dump(make_index: IndexMaker) -> None:
    index = new_index(make_index)
    dump = dumped(make_index, chain(0, 10))
    index.apply(A, [chain(0, 2)])
    with pytest.raises(DumpRefused, match="not_empty"):
        index.restore(A, dump)
    assert depth(index).blocks == 2
    with pytest.raises(KeyError):
        index.restore(EndpointId("stranger"), dump)
    with pytest.raises(KeyError):
        index.dump(EndpointId("stranger"))


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def u16(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "other-1"}, "scheme"),
        ({"model": "other"}, "model"),
        ({"block_size_tokens": 0}, "block_size"),
        ({"block_size_tokens": -1}, "block_size"),
        ({"block_size_tokens": 1 << 31}, "block_size"),
        ({"names": u64(1, 2)}, "columns"),
        ({"names": u64(1, 2, 3)[:-1]}, "columns"),
        ({"names": bytearray(u64(1, 2, 3))}, "columns"),
        ({"keys": u64(1, 2, 3, 4)}, "columns"),
        ({"device_copies": u16(1, 1)}, "columns"),
        ({"cpu_copies": b""}, "columns"),
        ({"names": u64(1, 2, 1)}, "duplicate"),
        ({"names": u64(1, 2, 1), "device_copies": u16(1, 1, 0)}, "duplicate"),
        ({"device_copies": u16(0, 0, 0)}, "limits"),
        (
            {
                "names": u64(*range(9)),
                "keys": u64(*range(9)),
                "device_copies": u16(*[1] * 9),
                "cpu_copies": u16(*[0] * 9),
            },
            "limits",
        ),
    ],
)
def test_what_no_index_could_have_dumped_is_refused(
    make_index: IndexMaker, change: dict[str, object], reason: str
) -> None:
    limits = IndexLimits(max_blocks=8, max_remembered_blocks=2)
    dump = replace(dumped(make_index, chain(0, 3)), **change)  # type: ignore[arg-type]
    assert refused(make_index, dump, limits) == reason


GROUP = GroupDump(1, "sliding_window", 3, 1, "", u64(1, 2), u64(5, 6), u16(1, 0), u16(0, 1))


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([replace(GROUP, names=u64(1))], "columns"),
        ([replace(GROUP, device_copies=u16(1, 0), cpu_copies=u16(1, 0))], "copies"),
        ([replace(GROUP, names=u64(1, 1))], "duplicate"),
        ([GROUP, GROUP], "group"),
        ([replace(GROUP, group_idx=None)], "group"),
        ([replace(GROUP, group_idx=0)], "group"),
        ([replace(GROUP, kind="mamba")], "group"),
        ([replace(GROUP, window_tokens=0)], "group"),
        ([replace(GROUP, window_tokens=1 << 40)], "group"),
        ([replace(GROUP, block_size_tokens=-1)], "group"),
        ([replace(GROUP, refusal="because")], "group"),
        ([replace(GROUP, group_idx=n) for n in range(1, 80)], "limits"),
        ([replace(GROUP, group_idx=n) for n in range(1, 12)], "limits"),
    ],
)
def test_groups_that_no_index_could_have_dumped_are_refused(
    make_index: IndexMaker, groups: list[GroupDump], reason: str
) -> None:
    limits = IndexLimits(max_blocks=20)
    dump = replace(dumped(make_index, chain(0, 3)), groups=tuple(groups))
    assert refused(make_index, dump, limits) == reason


def test_another_seed_makes_keys_that_no_prompt_has(make_index: IndexMaker) -> None:
    """Nothing can tell keys of another seed apart; they match nothing."""
    index = new_index(make_index, seed=b"f" * 16)
    index.restore(A, dumped(make_index, chain(0, 3)))
    assert depth(index).blocks == 0


def test_a_dump_larger_than_the_bytes_left_is_refused(make_index: IndexMaker) -> None:
    dump = dumped(make_index, *[chain(n, n + 1_000) for n in range(0, 10_000, 1_000)])
    assert refused(make_index, dump, IndexLimits(max_bytes=100_000)) == "full"
