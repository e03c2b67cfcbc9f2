"""A pull: session once, floor, shared bytes, deadline; the source keeps its copy and nothing ever fails."""

from __future__ import annotations

import pytest

from engine_plugin.identity import EndpointId
from simulator.fleet import Fleet
from simulator.pulls import PullLimits
from simulator.requests import Record
from tests.unit.simulator.world import LOAD_FIRST, PROFILE, SMALL, ask, fleet, text

TRANSFER, TIMING = PROFILE.transfer, PROFILE.timing
TOKENS = 30_016  # 469 blocks


def after_seeding(**changes: object) -> tuple[Fleet, Record]:
    """The prompt is on one endpoint, which is kept busy, so that the next request goes to the other one."""
    two = fleet(**changes)
    seeded = ask(two, text(1, TOKENS + 8))
    return two, seeded


def ask_elsewhere(two: Fleet, holder: str) -> Record:
    """The same prompt while the holder answers something long."""
    found: list[Record] = []
    now_s = two.timeline.now_s
    ids = [str(number) for number in range(1000, 1100)]
    busy = text(77, 500 + 4_000)
    two.timeline.at(now_s + 1.0, lambda: two.submit(busy, 500, 4_000))
    two.timeline.at(now_s + 2.0, lambda: found.append(two.submit(text(1, TOKENS + 8), TOKENS, 8, tag=ids[0])))
    two.run()
    return found[0]


def pulled(two: Fleet, seeded: Record) -> Record:
    """Until placement makes the holder a remote source (load decides, ties at random)."""
    for _ in range(8):
        record = ask_elsewhere(two, seeded.endpoint)
        if record.source:
            return record
        two = fleet(seed=two.seed + 1, warm_sessions=two.shape.warm_sessions, limits=two.shape.limits)
        seeded = ask(two, text(1, TOKENS + 8))
    raise AssertionError("placement never made a remote source")


def test_a_pull_takes_its_floor_and_its_bytes_and_saves_the_computing() -> None:
    two, seeded = after_seeding()
    record = pulled(two, seeded)
    blocks = (TOKENS - 1) // SMALL.block_tokens
    size = blocks * SMALL.block_tokens * PROFILE.kv_bytes_per_token
    assert record.pulled_tokens == blocks * SMALL.block_tokens
    assert record.pull_s == pytest.approx(TRANSFER.floor_s + size / TRANSFER.stream_bytes_per_s)
    step_s = TIMING.recompute_ms(TOKENS, record.pulled_tokens) / 1e3
    assert record.ttft_s == pytest.approx(record.pull_s + step_s)
    assert record.pull_end == "ok"


def test_the_first_pull_of_a_pair_pays_for_the_session() -> None:
    two, seeded = after_seeding(warm_sessions=False, limits=PullLimits(base_s=60.0, max_s=60.0))
    record = pulled(two, seeded)
    assert record.pull_s == pytest.approx(
        6.0 + TRANSFER.floor_s + record.pulled_bytes / TRANSFER.stream_bytes_per_s
    )


def test_a_pull_beyond_its_deadline_is_given_up_and_the_prompt_computed() -> None:
    two, seeded = after_seeding(warm_sessions=False, limits=PullLimits(base_s=1.0, max_s=2.0))
    record = pulled(two, seeded)
    assert record.pull_end == "deadline"
    assert record.pulled_tokens == 0
    assert record.computed_tokens == TOKENS
    assert record.latency_s is not None


def test_the_source_keeps_its_copy() -> None:
    two, seeded = after_seeding()
    holder = next(e for e in two.engines.values() if e.name.startswith(seeded.endpoint))
    names = text(1, TOKENS).names
    assert len(holder.cache.cpu.prefix(names)) == TOKENS // 64
    ask_elsewhere(two, seeded.endpoint)
    assert len(holder.cache.cpu.prefix(names)) == TOKENS // 64
    two.check()


def test_a_source_that_dies_costs_the_pull_and_not_the_request() -> None:
    two, seeded = after_seeding(limits=PullLimits(base_s=9.0, max_s=10.0))
    source = EndpointId(seeded.endpoint)
    busy = text(77, 500 + 4_000)
    now_s = two.timeline.now_s
    found: list[Record] = []
    two.timeline.at(now_s + 1.0, lambda: two.submit(busy, 500, 4_000))
    two.timeline.at(now_s + 2.0, lambda: found.append(two.submit(text(1, TOKENS + 8), TOKENS, 8)))
    two.timeline.at(now_s + 2.06, lambda: two.restart(source, 5.0))
    two.run()
    record = found[0]
    if record.source:
        assert record.pull_end == "peer"
        assert record.computed_tokens == TOKENS
    assert record.latency_s is not None or record.computing == seeded.endpoint
    two.check()


def test_pulls_off_in_the_configuration_move_nothing() -> None:
    without = LOAD_FIRST[: LOAD_FIRST.index("  - type: p2p-source-producer")]
    without += LOAD_FIRST[LOAD_FIRST.index("schedulingProfiles") :]
    two = fleet(without)
    seeded = ask(two, text(1, TOKENS + 8))
    record = ask_elsewhere(two, seeded.endpoint)
    assert (record.source, record.reason, two.network.moved_bytes) == ("", "not_configured", 0.0)
