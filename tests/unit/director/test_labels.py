"""Labels of request figures: the reference's, and bounded whatever clients send."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from epp.core.types import Outcome
from epp.extproc import wire
from epp.telemetry.label_names import LabelNames
from epp.telemetry.request_metrics import (
    MAX_FAIRNESS_IDS,
    MAX_MODELS,
    MAX_SERIES,
    RequestMetrics,
    RequestNames,
)
from tests.unit.director.rig import BASE, Rig

GOOD = Outcome(200, "x", 10, 2, 0, ttft_s=0.2, completed=True, response_bytes=700)
TOTAL = "llm_d_epp_request_total"


async def answered(rig: Rig, model: str, outcome: Outcome = GOOD, **headers: str) -> None:
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    routing = await rig.route({"model": model, "prompt": "Hello"}, headers=fields)
    rig.director.finished(routing.token, outcome)


async def test_who_asked_for_what_of_whom() -> None:
    rig = Rig()
    await answered(rig, BASE, x_llm_d_inference_fairness_id="team-a")
    labels = f'model_name="{BASE}",target_model_name="{BASE}",fairness_id="team-a",priority="0"'
    assert rig.value(f"{TOTAL}{{{labels}}}") == 1
    assert rig.value(f"llm_d_epp_response_size_bytes_sum{{{labels}}}") == 700
    assert rig.value(f'llm_d_epp_request_ttft_seconds_sum{{{labels},streaming="false"}}') == 0.2
    assert rig.value(f"llm_d_epp_request_running{{{labels}}}") == 0
    attempt = f'status="success",target_model_name="{BASE}",namespace="",port="8000"'
    assert rig.value(f"llm_d_epp_scheduler_attempts_total{{{attempt}}}") == 1


async def test_a_model_has_a_label_once_an_engine_has_answered_for_it() -> None:
    rig = Rig()
    await answered(rig, "made-up", Outcome(404, "x", completed=True))
    await answered(rig, "adapter")
    await answered(rig, "adapter")
    assert rig.value(f'{TOTAL}{{model_name="made-up"}}') == 0
    assert rig.value(f'{TOTAL}{{model_name="other"}}') == 2
    assert rig.value(f'{TOTAL}{{model_name="adapter"}}') == 1
    assert rig.value('llm_d_epp_request_error_total{error_code="status_4xx"}') == 1


async def test_a_renamed_request_is_counted_under_both_names() -> None:
    rig = Rig()
    for _ in range(2):
        await answered(rig, "alias", **{wire.MODEL_NAME_REWRITE[0]: BASE})
    assert rig.value(f'{TOTAL}{{model_name="alias",target_model_name="{BASE}"}}') == 1
    rewrites = "llm_d_epp_model_rewrite_decisions_total"
    assert rig.value(f'{rewrites}{{model_rewrite_name="header",target_model="{BASE}"}}') == 2


def test_clients_cannot_make_series_without_end() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for number in range(5_000):
        names = RequestNames(f"m{number % 997}", f"t{number % 991}", f"f{number}")
        series = metrics.asked(names, 10, is_base=False)
        metrics.started(series)
        metrics.ended(series, names, GOOD, 0.1)
    (total,) = (family for family in registry.collect() if family.name == "llm_d_epp_request")
    samples = [sample for sample in total.samples if sample.name == TOTAL]
    assert len(samples) <= MAX_SERIES + 1
    assert sum(sample.value for sample in samples) == 5_000  # nobody is lost, only unnamed
    assert len({sample.labels["fairness_id"] for sample in samples}) <= MAX_FAIRNESS_IDS + 1
    assert len({sample.labels["model_name"] for sample in samples}) <= MAX_MODELS + 1


@pytest.mark.parametrize("name", ["x" * 129, "y" * 5_000])
def test_long_names_are_no_labels(name: str) -> None:
    names = LabelNames(10)
    assert (names.admit(name), names.admit("short"), names.known("short")) == ("other", "short", "short")


async def test_a_body_that_is_no_json_is_counted_too() -> None:
    rig = Rig()
    with pytest.raises(Exception, match="JSON"):
        await rig.route({}, body=b"{")
    assert rig.value(TOTAL) == 1
    assert rig.value('llm_d_epp_request_error_total{error_code="bad-request"}') == 1
