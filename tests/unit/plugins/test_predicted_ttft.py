"""`kvpull-predicted-ttft-scorer`: the soonest endpoint wins, with the source that makes it the soonest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.thresholds import MODE_COST, PullSettings, everywhere
from epp.core.types import SchedulingDecision, SourceReason
from epp.ops.explain import lines
from epp.plugins.predicted_ttft import PredictedTtftScorer
from epp.plugins.unknown import NEUTRAL
from epp.telemetry.decision_json import decision_json
from tests.unit.core.test_endpoint_picker import BLOCK, BLOCKS, Pool
from tests.unit.plugins.pools import asked, loaded

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {local: {path: any}}
- type: precise-prefix-cache-producer
- type: p2p-source-producer
- type: kvpull-predicted-ttft-scorer
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins: [{pluginRef: kvpull-predicted-ttft-scorer}, {pluginRef: max-score-picker}]
"""
TOKENS = BLOCK * BLOCKS  # 3,200
COSTS = PullSettings(
    min_cached_token_delta=64,
    mode=MODE_COST,
    recompute_seed=RecomputeCurve(20.0, 50.0),  # 160 ms for all of them
    pull_seed=PullCurve(50.0, 2.0, 2_000.0),  # 36 ms
)


def pool(settings: PullSettings | None = COSTS) -> Pool:
    made = Pool(parse_config(CONFIG).settings)
    if settings is not None:
        made.picker.sources.set_thresholds(everywhere(settings))
    return made


def work(made: Pool, pod: str, tokens: int) -> None:
    """Uncomputed tokens of another request on `pod`."""
    endpoint = EndpointId(pod)
    made.picker.ledger.book(
        f"busy-{pod}-{tokens}",
        serving=endpoint,
        computing=endpoint,
        source=None,
        uncached_prompt_tokens=tokens,
    )


def where(decision: SchedulingDecision) -> tuple[str, str | None]:
    source = decision.kv_source
    return decision.destination.id.pod, source.id.pod if source else None


def test_the_queue_of_the_holder_is_weighed_against_a_pull_and_against_computing() -> None:
    made = pool()
    made.hold("b")
    assert where(made.ask("idle")) == ("b", None), "a hit costs nothing"
    work(made, "b", 400)  # 20 ms: less than the pull
    assert where(made.ask("short queue"))[0] == "b"
    work(made, "b", 1_000)
    decision = made.ask("long queue")
    assert where(decision) in (("a", "b"), ("c", "b"))
    assert decision.choice.reason is SourceReason.PULL
    taken, free = decision.destination.id.pod, {"a", "c"} - {decision.destination.id.pod}
    work(made, taken, 2_000)
    assert where(made.ask("one is taken")) == (free.pop(), "b")


def test_the_source_that_it_was_won_with_is_the_only_one_that_may_be_named() -> None:
    """Two equal holders, one of which serves pulls already: sampling would take it now and then."""
    made = pool(replace(COSTS, inflight_awareness=False))
    made.hold("a")
    made.hold("b")
    for pod in "ab":
        work(made, pod, 20_000)
    for number in range(4):
        endpoint = EndpointId("a")
        made.picker.ledger.book(
            f"pull-{number}",
            serving=endpoint,
            computing=endpoint,
            source=endpoint,
            uncached_prompt_tokens=0,
        )
    decisions = []
    for n in range(16):
        decision = made.ask(f"r{n}")
        decisions.append(where(decision))
        made.picker.release(decision.decision_id)
    assert set(decisions) == {("c", "b")}


def test_without_costs_it_has_no_opinion() -> None:
    made = pool(None)
    made.hold("b")
    decision = made.ask()
    assert {part for row in decision.scored for _, part in row.parts} == {NEUTRAL}
    assert decision.forecasts == {}
    rows = [loaded("a"), loaded("b")]
    assert list(PredictedTtftScorer("x").score(asked(), rows)) == [NEUTRAL, NEUTRAL]


def test_the_record_and_explain_show_every_part() -> None:
    made = pool()
    made.hold("b")
    work(made, "b", 4_000)
    decision = made.ask("why")
    record = made.picker.find_decision("why")
    assert record is not None
    body = decision_json(record)
    rows = {row["pod"]: row for row in body["forecasts"]}
    assert set(rows) == {"a", "b", "c"}
    winner = rows[decision.destination.id.pod]
    assert (winner["source"], winner["pull_ms"]) == ("b/0", pytest.approx(36.4))
    assert rows["b"]["busy_ms"] == pytest.approx(200.5)  # and one request runs beside it
    parts = sum(winner[name] for name in ("busy_ms", "floor_ms", "compute_ms", "pull_ms"))
    assert winner["ttft_ms"] == pytest.approx(parts, abs=0.01) == min(r["ttft_ms"] for r in rows.values())
    said = [line for line in lines(body) if "foreseen" in line]
    assert len(said) == 3
    assert f"foreseen on {decision.destination.id}" in said[0]
    assert "pull from b/0 36.4 + computing" in said[0]


def test_it_is_announced_as_experimental_and_off_elsewhere() -> None:
    assert any("kvpull-predicted-ttft-scorer is experimental" in n for n in parse_config(CONFIG).notes)
    assert parse_config(CONFIG).settings.looks_ahead
    assert not Pool().picker._settings.looks_ahead
