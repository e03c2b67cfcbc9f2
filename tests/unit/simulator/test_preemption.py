"""Preemption: the youngest starts over, nobody loses a token of its answer, and some is computed twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import EngineShape
from simulator.fleet import Fleet
from tests.unit.simulator.world import SMALL, fleet, text

TIGHT = EngineShape(block_tokens=64, device_tokens=6_400, cpu_tokens=64_000, preempts=True)


def two_long_answers(shape: EngineShape) -> Fleet:
    """3,000 and 3,000 tokens of prompt fit into 6,400; their answers of 500 each do not."""
    one = fleet(engines=1, shape=shape)
    for number in (1, 2):
        one.timeline.at(0.1 * number, one.submit, text(number, 3_500), 3_000, 500)
    one.run()
    one.check()
    return one


def test_the_youngest_starts_over_and_both_answers_are_complete() -> None:
    first, second = two_long_answers(TIGHT).records
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert not first.failed
    assert not second.failed
    assert second.ended_s is not None
    assert first.ended_s is not None
    assert second.ended_s > first.ended_s
    assert (
        second.computed_tokens + second.device_hit_tokens + second.restored_tokens > 3_000
    )  # some of it twice


def test_with_room_for_whole_answers_nobody_is_preempted_and_times_are_as_without() -> None:
    plain = two_long_answers(replace(TIGHT, device_tokens=12_800, preempts=False))
    ample = two_long_answers(replace(TIGHT, device_tokens=12_800))
    assert [r.preemptions for r in ample.records] == [0, 0]
    assert [round(r.ended_s or 0, 9) for r in ample.records] == [
        round(r.ended_s or 0, 9) for r in plain.records
    ]


def test_reserving_answers_makes_the_second_wait_instead() -> None:
    first, second = two_long_answers(replace(TIGHT, preempts=False)).records
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert second.first_token_s is not None
    assert first.ended_s is not None
    assert second.first_token_s > first.ended_s


def test_a_request_that_can_never_fit_fails_and_takes_nobody_with_it() -> None:
    one = fleet(engines=1, shape=replace(TIGHT, device_tokens=640))
    one.timeline.at(0.0, one.submit, text(1, 1_000), 600, 400)
    one.timeline.at(0.1, one.submit, text(2, 500), 400, 100)
    one.run()
    one.check()
    assert [bool(r.failed) for r in one.records] == [True, False]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 4), st.integers(1, 40), st.integers(1, 300)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_preempted_every_answer_ends_and_nothing_is_lost(
    work: list[tuple[float, int, int, int]],
) -> None:
    one = fleet(engines=1, shape=replace(SMALL, device_tokens=3_200, preempts=True))
    for at_s, number, blocks, output in work:
        one.timeline.at(at_s, one.submit, text(number, blocks * 64 + 5 + output), blocks * 64 + 5, output)
    one.run()
    one.check()
    for record in one.records:
        assert record.ended_s is not None
        if not record.failed:
            assert record.first_token_s is not None
            assert record.first_token_s <= record.ended_s
