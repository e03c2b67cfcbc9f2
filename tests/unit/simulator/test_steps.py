"""Ranks of one instance step together: a step takes as long as the slowest of them, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.engine_model.timing import PrefillChunk
from simulator.engine import SimulatedEngine
from simulator.fleet import Fleet
from simulator.requests import EngineRequest, Record
from tests.unit.simulator.world import PROFILE, fleet, text

TIMING = PROFILE.timing


def send(ranks: Fleet, rank: int, number: int, prompt: int, output: int, at_s: float) -> Record:
    """Past the picker, to the rank that the test is about."""
    record = Record(f"{rank}-{number}", "", at_s, prompt, output)

    def first_token(_: EngineRequest) -> None:
        record.first_token_s = ranks.timeline.now_s

    def ended(_: EngineRequest, complete: bool) -> None:
        record.ended_s = ranks.timeline.now_s if complete else None

    content = text(number, prompt + output)
    request = EngineRequest(record, content, prompt, output, first_token, ended)
    ranks.timeline.at(at_s, engines(ranks)[rank].submit, request)
    return record


def engines(ranks: Fleet) -> list[SimulatedEngine]:
    return list(ranks.engines.values())


def chunk_s(tokens: int, context: int = 0) -> float:
    return TIMING.step_ms((PrefillChunk(tokens, context),), ()) * 1e-3


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    two = fleet(engines=2, ranks_per_instance=2)
    long = send(two, 0, 1, 8_192, 1, 0.0)
    short = send(two, 1, 2, 500, 1, 0.1)  # the instance is in a step of the other rank
    two.run()
    assert long.ttft_s == pytest.approx(chunk_s(8_192))
    assert short.first_token_s == pytest.approx(chunk_s(8_192) + chunk_s(500))
    busy = send(two, 0, 3, 8_192 * 3, 1, 10.0)
    both = send(two, 1, 4, 8_192 + 64, 1, 10.1)  # its second step is 64 tokens beside 8,192
    two.run()
    whole_s = chunk_s(8_192) + chunk_s(8_192, 8_192) + chunk_s(8_192, 16_384)
    assert busy.ttft_s == pytest.approx(whole_s)
    assert both.first_token_s == pytest.approx(10.0 + whole_s)


def test_a_device_computes_its_share_of_the_experts_for_all_ranks() -> None:
    sharing = replace(PROFILE, timing=replace(TIMING, shared_token_us=40.0))
    for ranks, extra_s in ((4, 3 * 8_192 * 40e-6 / 4), (1, 0.0)):
        four = fleet(engines=4, ranks_per_instance=ranks)
        for engine in engines(four):
            engine.profile = sharing
        first = send(four, 0, 1, 8_192 * 2, 1, 0.0)
        others = [send(four, rank, 1 + rank, 8_192, 1, 0.1) for rank in (1, 2, 3)]
        four.run()
        assert first.ttft_s == pytest.approx(chunk_s(8_192) + chunk_s(8_192, 8_192) + extra_s)
        if ranks == 4:  # beside the slowest rank
            assert {r.first_token_s for r in others} == {first.first_token_s}


def test_engines_of_their_own_do_not_wait_for_each_other() -> None:
    """The negative control of the test above."""
    two = fleet(engines=2)
    send(two, 0, 1, 8_192, 1, 0.0)
    short = send(two, 1, 2, 500, 1, 0.1)
    two.run()
    assert short.ttft_s == pytest.approx(chunk_s(500))


def test_a_lone_request_takes_what_it_takes_on_one_engine() -> None:
    """So a crossover table, one request at a time, says nothing about ranks."""
    times = []
    for ranks in (1, 4):
        four = fleet(engines=4, ranks_per_instance=ranks)
        record = send(four, 2, 1, 20_000, 30, 0.0)
        four.run()
        times.append((record.ttft_s, record.latency_s))
    assert times[0] == times[1]


def test_a_rank_that_dies_loses_its_own_work_alone() -> None:
    two = fleet(engines=2, ranks_per_instance=2)
    kept = send(two, 0, 1, 30_000, 5, 0.0)
    lost = send(two, 1, 2, 30_000, 5, 0.0)
    two.timeline.at(0.3, engines(two)[1].lose_everything)
    two.run()
    assert kept.ended_s is not None
    assert (lost.first_token_s, lost.ended_s) == (None, None)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 4), st.integers(65, 20_000), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    )
)
def test_ranks_lose_no_token_and_shortcuts_change_no_time(
    work: list[tuple[float, int, int, int]],
) -> None:
    quick, slow = fleet(engines=3, ranks_per_instance=3), fleet(engines=3, ranks_per_instance=3)
    stepper = engines(slow)[0]._stepper
    original = stepper._schedule

    def single(step: object) -> None:
        step.count = 1  # type: ignore[attr-defined]
        original(step)  # type: ignore[arg-type]

    stepper._schedule = single  # type: ignore[method-assign,assignment]
    for which in (quick, slow):
        for at_s, number, prompt, output in work:
            which.timeline.at(at_s, which.submit, text(number, prompt + output), prompt, output)
        which.run()
        which.check()
    for a, b in zip(quick.records, slow.records, strict=True):
        assert a.ttft_s == pytest.approx(b.ttft_s)
        assert a.latency_s == pytest.approx(b.latency_s)
        held = a.device_hit_tokens + a.restored_tokens + a.pulled_tokens
        assert held + a.computed_tokens == a.prompt_tokens
