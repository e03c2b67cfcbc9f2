"""Clients and figures: who sends what when, and what is counted."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from engine_plugin.identity import EndpointId
from simulator.clients import Conversations, RateStages, Script, Stage, Turn
from simulator.prompts import random_tokens
from simulator.requests import Record
from simulator.summary import Estimate, percentile, summarise
from tests.unit.simulator.world import AFFINITY, fleet


def scripts(count: int, turns: int = 3) -> list[Script]:
    rng = random.Random(count)
    return [
        Script(random_tokens(rng, 1_000), (Turn(50, 20, 0.0), *[Turn(50, 20, 2.0)] * (turns - 1)))
    ] * count


def test_conversations_grow_pause_and_stay_within_their_concurrency() -> None:
    one = fleet(AFFINITY, engines=2)
    cold, warm = Conversations(2, 0.1).run(one, scripts(5), 1)
    assert len(cold.records) == len(warm.records) == 15
    assert sorted({r.prompt_tokens for r in cold.records}) == [1050, 1120, 1190]
    edges = sorted([(r.sent_s, 1) for r in cold.records] + [(r.ended_s or 0.0, -1) for r in cold.records])
    open_now = [sum(step for _, step in edges[: n + 1]) for n in range(len(edges))]
    assert max(open_now) <= 2
    assert warm.began_s >= max(r.ended_s or 0.0 for r in cold.records)
    assert sum(r.computed_tokens for r in warm.records) < sum(r.computed_tokens for r in cold.records)


def test_a_client_comes_back_after_a_restart_and_not_after_its_own_limit() -> None:
    one = fleet(AFFINITY, engines=1)
    one.timeline.at(0.05, one.restart, EndpointId("engine-0000"), 3.0)
    (stage,) = Conversations(1, 0.0, ("only",), retry_s=1.0).run(one, scripts(1), 1)
    answered = [r.prompt_tokens for r in stage.records if not r.failed]
    assert answered == [1050, 1120, 1190]
    assert [r.failed for r in stage.records if r.failed][:2] == ["restart", "no_endpoint"]
    (gone,) = Conversations(1, 0.0, ("only",), timeout_s=0.001, retry_s=1.0).run(
        fleet(AFFINITY, engines=1), scripts(1), 1
    )
    assert [r.failed for r in gone.records] == ["timeout"]


def test_nothing_is_sent_after_the_window_and_nothing_later_counts() -> None:
    one = fleet(AFFINITY, engines=1)
    (stage,) = Conversations(1, 0.0, ("only",), window_s=3.0).run(one, scripts(1, turns=9), 1)
    assert max(r.sent_s for r in stage.records) < 3.0
    figures = summarise(stage)
    within = [r for r in stage.records if (r.ended_s or math.inf) <= 3.0]
    assert figures["rate_per_s"] == pytest.approx(len(within) / 3.0)


def test_arrivals_follow_their_rate_and_their_skew() -> None:
    def tags(zipf: tuple[float, ...]) -> list[str]:
        stages = RateStages(8, 64, 16, 1, (200.0,), 2.0, zipf=zipf).run(fleet(AFFINITY, engines=2), 3)
        return [r.tag for stage in stages for r in stage.records]

    even, skewed = tags((0.0,)), tags((1.4,))
    assert len(even) == len(skewed) == pytest.approx(400, rel=0.2)  # the same arrivals
    assert even.count("0") < len(even) * 0.2
    assert skewed.count("0") > len(skewed) * 0.3


def test_percentiles_and_intervals() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert math.isnan(percentile([], 50))
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.seeds) == (2.0, 3)
    assert estimate.half_width == pytest.approx(4.30 / math.sqrt(3))
    assert Estimate.of([5.0]) == Estimate(5.0, 0.0, 1)


def test_failed_requests_are_counted_and_never_timed() -> None:
    good = Record("a", "", 0.0, 100, 11, first_token_s=1.0, ended_s=2.0, computed_tokens=100)
    bad = Record("b", "", 0.0, 100, 11, first_token_s=9.0, ended_s=10.0, failed="timeout")
    figures = summarise(Stage("s", 0.0, [good, bad]))
    assert (figures["requests"], figures["failed"], figures["ttft_p99_s"]) == (2, 1, 1.0)
    assert figures["rate_per_s"] == pytest.approx(0.1)
    assert figures["tpot_p50_ms"] == pytest.approx(100.0)


def test_counted_arrivals_and_dealt_prefixes_are_as_many_as_the_harness_sends() -> None:
    """As inference-perf: no stage has a request more or less, no prefix is asked for more often."""
    rates = RateStages(8, 64, 16, 1, (40.0, 80.0), 2.0, counted=True, dealt=True)
    first, second = rates.run(fleet(AFFINITY, engines=2), 3)
    assert (len(first.records), len(second.records)) == (80, 160)
    last_s = max(r.sent_s for r in first.records) - first.began_s
    assert last_s == pytest.approx(2.0)
    asked = Counter(r.tag for r in [*first.records, *second.records])
    assert len(asked) == 8
    assert max(asked.values()) <= 240 * 1.1 / 8 + 2  # the whole deck; an independent draw goes beyond
    with pytest.raises(ValueError, match="no skew"):
        RateStages(8, 64, 16, 1, (40.0,), 2.0, zipf=(1.0,), dealt=True)
    drawn = RateStages(8, 64, 16, 1, (40.0, 80.0), 2.0).run(fleet(AFFINITY, engines=2), 3)
    assert len(drawn[0].records) != 80
