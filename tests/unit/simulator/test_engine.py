"""One engine in virtual time: its times are the model's, and no token, block or byte is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.requests import Record
from tests.unit.simulator.world import PROFILE, ask, fleet, text

TIMING = PROFILE.timing


def accounted(record: Record) -> int:
    return record.device_hit_tokens + record.restored_tokens + record.pulled_tokens + record.computed_tokens


def test_a_cold_prompt_takes_what_the_model_says() -> None:
    record = ask(fleet(engines=1), text(1, 20_008), 8)
    assert record.ttft_s == pytest.approx(TIMING.recompute_ms(20_000) / 1e3)
    contexts = range(20_000, 20_007)
    decode_ms = sum(TIMING.step_ms((), (context,)) for context in contexts)
    assert record.latency_s == pytest.approx((TIMING.recompute_ms(20_000) + decode_ms) / 1e3)
    assert record.computed_tokens == 20_000


def test_a_repeated_prompt_is_a_device_hit_but_for_the_block_of_its_last_token() -> None:
    one = fleet(engines=1)
    ask(one, text(1, 6408), 8)
    again = ask(one, text(1, 6408), 8)
    assert (again.device_hit_tokens, again.computed_tokens) == (6336, 64)
    assert again.ttft_s == pytest.approx(TIMING.recompute_ms(6400, 6336) / 1e3)


def test_what_the_device_has_forgotten_comes_back_from_the_cpu_tier() -> None:
    one = fleet(engines=1)
    ask(one, text(1, 64_008), 8)
    for number in range(2, 6):  # 4 x 64,000 tokens push the first one out of 200,000
        ask(one, text(number, 64_008), 8)
    again = ask(one, text(1, 64_008), 8)
    assert again.device_hit_tokens == 0
    assert (again.restored_tokens, again.computed_tokens) == (63_936, 64)
    link_s = 63_936 * PROFILE.kv_bytes_per_token / PROFILE.transfer.restore_bytes_per_s
    wanted_s = 0.008 + link_s + TIMING.recompute_ms(64_000, 63_936) / 1e3
    assert again.ttft_s == pytest.approx(wanted_s)
    one.check()


def test_decode_goes_on_while_another_prompt_is_computed_and_costs_it_its_share() -> None:
    one = fleet(engines=1)
    first = text(1, 1_000 + 200)
    second = text(2, 8_000 + 4)
    records = []
    one.timeline.at(0.0, lambda: records.append(one.submit(first, 1_000, 200)))
    one.timeline.at(0.2, lambda: records.append(one.submit(second, 8_000, 4)))
    one.run()
    alone = ask(fleet(engines=1), second, 4)
    assert alone.ttft_s is not None
    assert records[1].ttft_s is not None
    assert records[1].ttft_s > alone.ttft_s  # waits for the step boundary, shares the step
    assert records[1].ttft_s < alone.ttft_s + 0.02
    assert records[0].latency_s is not None
    assert records[1].ended_s is not None
    assert records[0].ended_s is not None
    assert records[0].ended_s > records[1].ended_s


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=12))
def test_runs_of_decode_steps_end_as_single_steps_would(work: list[tuple[float, int, int]]) -> None:
    """The shortcut (equal decode steps at once) changes no time: compare with one that never takes it."""
    quick, slow = fleet(engines=1), fleet(engines=1)
    for engine in slow.engines.values():
        original = engine._stepper._schedule

        def single(step: object, original: object = original) -> None:
            step.count = 1  # type: ignore[attr-defined]
            original(step)  # type: ignore[operator]

        engine._stepper._schedule = single  # type: ignore[method-assign,assignment]
    for which in (quick, slow):
        for at_s, number, output in work:
            content = text(number, 2_000 + output)
            which.timeline.at(at_s, which.submit, content, 2_000, output)
        which.run()
        which.check()
    for a, b in zip(quick.records, slow.records, strict=True):
        assert a.ttft_s == pytest.approx(b.ttft_s)
        assert a.latency_s == pytest.approx(b.latency_s)
        assert a.device_hit_tokens == b.device_hit_tokens


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 4), st.integers(0, 5), st.integers(1, 700), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 3),
)
def test_every_prompt_token_is_held_restored_pulled_or_computed_exactly_once(
    work: list[tuple[float, int, int, int]], engines: int
) -> None:
    several = fleet(engines=engines)
    for at_s, number, blocks, output in work:
        content = text(number, blocks * 64 + 5 + output)
        several.timeline.at(at_s, several.submit, content, blocks * 64 + 5, output)
    several.run()
    several.check()
    for record in several.records:
        assert not record.failed
        assert accounted(record) == record.prompt_tokens
        assert record.pulled_bytes == record.pulled_tokens * PROFILE.kv_bytes_per_token
    moved = sum(record.pulled_bytes for record in several.records)
    assert several.network.moved_bytes == pytest.approx(moved, rel=1e-6, abs=1.0)


def test_a_client_that_leaves_frees_everything_it_held() -> None:
    one = fleet(engines=1)
    content = text(1, 60_008)
    other = text(2, 60_008)
    one.timeline.at(0.0, lambda: one.submit(content, 60_000, 8, timeout_s=0.5))  # while computing
    one.timeline.at(0.1, lambda: one.submit(other, 60_000, 8, timeout_s=0.2))  # while waiting
    one.run()
    assert [r.failed for r in one.records] == ["timeout", "timeout"]
    assert [r.ttft_s for r in one.records] == [None, None]
    one.check()
    assert next(iter(one.engines.values())).cache.device.in_use == 0


def test_nothing_starts_behind_a_full_step() -> None:
    """A pull cannot begin while every step is full: the request is still waiting then, as in vLLM."""
    two = fleet(engines=1)
    long, short = text(1, 40_008), text(2, 508)
    two.timeline.at(0.0, lambda: two.submit(long, 40_000, 8))
    two.timeline.at(0.1, lambda: two.submit(short, 500, 8))
    engine = next(iter(two.engines.values()))
    seen = []
    two.timeline.at(0.3, lambda: seen.append((engine.running, engine.waiting)))
    two.run()
    assert seen == [(1, 1)]
