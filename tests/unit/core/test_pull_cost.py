"""Cost mode in the picker: learned per pair, unsure falls back, and both verdicts are always recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.core.decision_record import DecisionRecord, PullState
from epp.core.pull_cost import MAX_PAIRS, PullCosts
from epp.core.pull_curves import PullCurve, PullPrediction, RecomputeCurve
from epp.core.thresholds import MODE_COST, PullSettings, SourcePolicy, everywhere
from epp.core.types import (
    Candidate,
    InflightLoad,
    KvSource,
    Outcome,
    PullReport,
    SchedulingDecision,
    SourceChoice,
    SourceReason,
)
from epp.telemetry.decision_json import decision_json, read_predicted
from tests.unit.core.rows import candidate, info
from tests.unit.core.test_endpoint_picker import BLOCK, BLOCKS
from tests.unit.core.test_pull_lifecycle import busy_pool, report

TOKEN_BYTES = 2_000.0
RECOMPUTE = RecomputeCurve(20.0, 50.0)  # 50 ms a thousand tokens
PULL = PullCurve(50.0, 2.0, TOKEN_BYTES)  # 30 ms beside the step, 2 ms a thousand tokens
TERMS = SourcePolicy(
    configured=True,
    min_cached_token_delta=2048,
    mode=MODE_COST,
    recompute_seed=RECOMPUTE,
    pull_seed=PULL,
)
DESTINATION = candidate("d", engine=info())
NEAR, FAR = (candidate(name, blocks=BLOCKS, engine=info()) for name in ("near", "far"))


def predict(
    costs: PullCosts, source: Candidate, tokens: int = 4000, terms: SourcePolicy = TERMS, now_s: float = 0.0
) -> PullPrediction:
    found = costs.predict(source, DESTINATION, tokens, terms, now_s)
    assert found is not None
    return found


def ended(
    *,
    source: Candidate | None = None,
    tokens: int = 4000,
    pull_ms: float = 40.0,
    ttft_ms: float | None = None,
    prompt: int = 8000,
    cached: int = 0,
    reason: str = "ok",
    computing: Candidate = DESTINATION,
) -> DecisionRecord:
    """A request that has ended, with its pull reported."""
    named = KvSource(source.endpoint, tokens, tokens) if source else None
    choice = SourceChoice(named, SourceReason.PULL, holders=(source,) if source else ())
    received = tokens if reason == "ok" else 0
    pulled = PullReport("x", "", tokens, received, int(received * TOKEN_BYTES), reason, pull_ms)
    decision = SchedulingDecision(
        "x",
        "r",
        computing.endpoint,
        (),
        None,
        choice,
        (),
        computing.endpoint.id,
        0,
        prompt_tokens=prompt,
        computed_by=computing,
    )
    outcome = Outcome(
        200, None, prompt, 1, cached, None if ttft_ms is None else ttft_ms / 1e3, completed=True
    )
    state = PullState.REPORTED if source else PullState.NONE
    return DecisionRecord(0.0, decision, outcome, state, pulled if source else None)


def warm(costs: PullCosts, source: Candidate, pull_ms: float = 40.0, count: int = 2) -> None:
    for _ in range(count):
        costs.learn(ended(source=source, pull_ms=pull_ms), TERMS, 0.0)


def test_before_anything_was_seen_the_calibrated_curves_speak() -> None:
    found = predict(PullCosts(), NEAR)
    assert (found.pull_ms, found.recompute_ms) == (pytest.approx(30.0 + 8.0), pytest.approx(200.0))
    assert (found.sure, found.cheaper) == (True, True)
    assert not predict(PullCosts(), NEAR, 500).cheaper  # 31 ms against 25
    nothing = replace(TERMS, recompute_seed=None, pull_seed=None)
    assert PullCosts().predict(NEAR, DESTINATION, 4000, nothing, 0.0) is None


def test_a_throttled_pair_is_learned_and_the_other_keeps_its_price() -> None:
    costs = PullCosts()
    warm(costs, FAR, pull_ms=830.0)  # 0.2 ms a token
    warm(costs, NEAR, pull_ms=38.0)
    far, near = predict(costs, FAR), predict(costs, NEAR)
    assert (far.pull_ms, far.cheaper) == (pytest.approx(830.0), False)
    assert (near.pull_ms, near.cheaper) == (pytest.approx(38.0), True)
    assert predict(costs, FAR, 8000).pull_ms == pytest.approx(1630.0)  # it is the slope that differs


def test_a_pair_that_was_dear_is_tried_again_later() -> None:
    costs = PullCosts()
    warm(costs, FAR, pull_ms=830.0)
    assert not predict(costs, FAR, now_s=599.0).cheaper
    assert predict(costs, FAR, now_s=601.0).cheaper


def test_the_first_pull_of_a_session_pays_and_is_not_taken_for_the_link() -> None:
    costs = PullCosts()
    assert predict(costs, NEAR, terms=replace(TERMS, pull_seed=replace(PULL, cold_ms=500.0))).cold_ms == 500.0
    warm(costs, NEAR, pull_ms=640.0, count=1)
    assert predict(costs, NEAR).pull_ms == pytest.approx(38.0)
    warm(costs, NEAR, pull_ms=40.0, count=1)
    assert predict(costs, NEAR).pull_ms == pytest.approx(40.0)
    assert predict(costs, NEAR).cold_ms == 0.0
    other = predict(costs, FAR)  # a pair that has not met
    assert (other.cold_ms, other.pull_ms) == (pytest.approx(600.0), pytest.approx(638.0))
    restarted = NEAR._replace(metrics=replace(NEAR.metrics, info=info(instance="new")))
    assert predict(costs, restarted).cold_ms == pytest.approx(600.0)


def _longer_than_known(record: DecisionRecord) -> DecisionRecord:
    """The engine counted more tokens than the router knows: several prompts, or text before a picture."""
    assert record.outcome is not None
    assert record.decision.prompt_tokens is not None
    outcome = replace(record.outcome, prompt_tokens=record.decision.prompt_tokens + 1)
    return replace(record, outcome=outcome)


def test_recompute_is_learned_from_undisturbed_requests_only() -> None:
    costs = PullCosts()
    busy = DESTINATION._replace(load=InflightLoad(requests=3))
    for record in (
        ended(ttft_ms=9_000.0, computing=busy),
        ended(ttft_ms=9_000.0, cached=7_990),
        replace(ended(ttft_ms=9_000.0), outcome=Outcome(500, ttft_s=9.0)),
        _longer_than_known(ended(ttft_ms=9_000.0)),
    ):
        costs.learn(record, TERMS, 0.0)
    assert predict(costs, NEAR).recompute_ms == pytest.approx(200.0)
    for _ in range(3):
        costs.learn(ended(ttft_ms=920.0), TERMS, 0.0)  # one length tells a slow gateway, not slow tokens
    assert predict(costs, NEAR).recompute_ms == pytest.approx(200.0)
    for prompt in (1000, 2000, 4000, 8000):  # twice as slow as calibrated
        costs.learn(ended(ttft_ms=120.0 + 0.1 * prompt, prompt=prompt), TERMS, 0.0)
    assert predict(costs, NEAR).recompute_ms == pytest.approx(400.0)


def test_tokens_late_in_a_prompt_cost_more_to_compute() -> None:
    terms = replace(TERMS, recompute_seed=RecomputeCurve(20.0, 50.0, 5.0))
    late = DESTINATION._replace(match=candidate("d", blocks=500).match)
    early_ms, late_ms = (
        PullCosts().predict(NEAR, row, 4000, terms, 0.0).recompute_ms  # type: ignore[union-attr]
        for row in (DESTINATION, late)
    )
    assert early_ms == pytest.approx(200.0 + 80.0)
    held = late.match.expected_tokens
    assert late_ms == pytest.approx(200.0 + 5e-6 * ((held + 4000) ** 2 - held**2))


def test_load_of_both_ends_counts() -> None:
    costs = PullCosts()
    serving = NEAR._replace(load=InflightLoad(pulls_served=3))
    assert predict(costs, serving).pull_ms == pytest.approx(30.0 + 4 * 8.0)
    computing = DESTINATION._replace(load=InflightLoad(uncached_prompt_tokens=2000))
    found = costs.predict(NEAR, computing, 500, TERMS, 0.0)
    assert found is not None
    assert (found.hidden_ms, found.cheaper) == (pytest.approx(50.0), True)  # dearer, but in its shadow
    queued = computing._replace(metrics=replace(computing.metrics, waiting_requests=2.0))
    found = costs.predict(NEAR, queued, 500, TERMS, 0.0)
    assert found is not None
    assert (found.hidden_ms, found.cheaper) == (0.0, False)


def test_a_pull_that_ran_out_of_time_counts_and_one_that_missed_does_not() -> None:
    costs = PullCosts()
    warm(costs, NEAR)
    for _ in range(3):
        costs.learn(ended(source=NEAR, pull_ms=2_000.0, reason="miss"), TERMS, 0.0)
    assert predict(costs, NEAR).cheaper
    for _ in range(3):
        costs.learn(ended(source=NEAR, pull_ms=10_000.0, reason="timeout"), TERMS, 0.0)
    assert not predict(costs, NEAR).cheaper


def test_what_is_remembered_is_bounded() -> None:
    costs = PullCosts()
    for number in range(MAX_PAIRS + 10):
        warm(costs, candidate(f"s{number}", blocks=8, engine=info()))
    assert len(costs) == MAX_PAIRS


def test_cost_mode_decides_and_the_threshold_is_shown_beside_it() -> None:
    pool = busy_pool()
    tokens = BLOCK * BLOCKS
    settings = PullSettings(
        min_cached_token_delta=tokens + 1, mode=MODE_COST, recompute_seed=RECOMPUTE, pull_seed=PULL
    )
    pool.picker.sources.set_thresholds(everywhere(settings))
    decision = pool.ask("below-delta")
    assert decision.choice.reason is SourceReason.PULL, "the threshold would not, the cost does"
    record = pool.picker.find_decision("below-delta")
    assert record is not None
    shown = decision_json(record)["predicted"]
    assert (shown["cost_says"], shown["threshold_says"], shown["decided_by"]) == ("pull", "compute", "cost")
    assert read_predicted({"predicted": shown}) == decision.choice.predicted

    dear = replace(settings, min_cached_token_delta=1, cost_margin_ms=10_000.0)
    pool.picker.sources.set_thresholds(everywhere(dear))
    decision = pool.ask("dear")
    assert (decision.choice.reason, decision.kv_source) == (SourceReason.NOT_CHEAPER, None)

    pool.picker.sources.set_thresholds(everywhere(replace(dear, mode="threshold")))
    decision = pool.ask("by-threshold")
    assert decision.choice.reason is SourceReason.PULL
    record = pool.picker.find_decision("by-threshold")
    assert record is not None
    shown = decision_json(record)["predicted"]
    assert (shown["cost_says"], shown["threshold_says"], shown["decided_by"]) == (
        "compute",
        "pull",
        "threshold",
    )


def test_unsure_falls_back_to_the_threshold() -> None:
    """Cost mode without calibration: nothing is known, the delta decides."""
    pool = busy_pool()
    for delta, reason in ((1, SourceReason.PULL), (10**6, SourceReason.BELOW_DELTA)):
        settings = PullSettings(min_cached_token_delta=delta, mode=MODE_COST)
        pool.picker.sources.set_thresholds(everywhere(settings))
        choice = pool.ask(f"r{delta}").choice
        assert (choice.reason, choice.by_cost) == (reason, False)


def test_the_picker_learns_from_reports_and_answers_in_either_order() -> None:
    pool = busy_pool()
    picker = pool.picker
    settings = PullSettings(
        min_cached_token_delta=1, mode=MODE_COST, recompute_seed=RECOMPUTE, pull_seed=PULL
    )
    picker.sources.set_thresholds(everywhere(settings))
    for number in range(8):
        decision = pool.ask(f"r{number}")
        if decision.kv_source is None:
            break
        slow = report(decision.decision_id, duration_ms=5_000.0)
        if number % 2:
            picker.pull_finished(slow, decision.computing)
            picker.release(decision.decision_id, Outcome(status=200))
        else:
            picker.release(decision.decision_id, Outcome(status=200))
            picker.pull_finished(slow, decision.computing)
    assert decision.choice.reason is SourceReason.NOT_CHEAPER
    assert decision.choice.predicted is not None
    assert decision.choice.predicted.pull_ms == pytest.approx(5_000.0)
    assert EndpointId("b") in {holder.endpoint.id for holder in decision.choice.holders}


def test_noisy_prices_still_decide_where_they_lie_far_apart() -> None:
    """Pulls take 300 to 1,200 ms: of 4 s against them there is no doubt, of about the same there is.
    An unsure price leaves it to the threshold; if that says no, nothing would ever be learned again."""
    costs = PullCosts()
    for pull_ms in (900.0, 300.0, 1_200.0, 320.0, 1_150.0, 310.0, 1_180.0):
        warm(costs, FAR, pull_ms=pull_ms, count=1)
    slow, equal = (replace(TERMS, recompute_seed=RecomputeCurve(20.0, us)) for us in (1_000.0, 190.0))
    far_apart, close = predict(costs, FAR, terms=slow), predict(costs, FAR, terms=equal)
    assert (far_apart.sure, far_apart.cheaper) == (True, True)
    assert not close.sure
    dear = predict(costs, FAR, terms=replace(slow, cost_margin_ms=30_000.0))
    assert (dear.sure, dear.cheaper) == (True, False), "the margin is part of what is compared"


def test_what_computing_costs_has_a_part_for_every_request_and_one_for_its_tokens() -> None:
    costs = PullCosts()
    found = costs.compute(DESTINATION, 4_000, 0, TERMS, 0.0)
    assert found == (20.0, pytest.approx(200.0))
    assert costs.compute(DESTINATION, 4_000, 0, replace(TERMS, recompute_seed=None), 0.0) is None
    assert costs.token_bytes(DESTINATION.endpoint.id) is None
    warm(costs, NEAR)
    assert costs.token_bytes(DESTINATION.endpoint.id) == TOKEN_BYTES
