"""Figures of requests: what the histograms say after answers of every kind."""

from __future__ import annotations

import gzip
import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from epp.core.types import GAP_BOUNDS_S, Outcome, OutputTiming
from epp.extproc.events import Degradation
from epp.telemetry.request_metrics import DegradedCollector
from tests.unit.director.rig import BASE, Rig


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def finish(outcome: Outcome, duration_s: float = 2.0) -> Rig:
    rig, clock = Rig(), Clock()
    rig.director._clock = clock
    routing = await rig.route({"model": BASE, "prompt": "Hello"})
    clock.now_s += duration_s
    rig.director.finished(routing.token, outcome)
    return rig


def gaps(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(f"at_{number}", 0) for number in range(len(GAP_BOUNDS_S) + 1))


async def test_a_streamed_answer() -> None:
    timing = OutputTiming(first_to_last_s=1.0, gap_counts=gaps(at_0=3, at_4=1))
    outcome = Outcome(200, "x", 100, 5, 64, ttft_s=0.5, completed=True, output=timing)
    rig = await finish(outcome)
    for name, value in {
        "input_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 5,
        "ntpot_seconds": 2.0 / 5,
        "streaming_tpot_seconds": 1.0 / 4,
        "streaming_itl_seconds": 1.0,
    }.items():
        assert rig.value(f"llm_d_epp_request_{name}_sum") == pytest.approx(value), name
    itl = "llm_d_epp_request_streaming_itl_seconds"
    assert rig.value(f'{itl}_bucket{{le="0.001"}}') == 3
    assert rig.value(f'{itl}_bucket{{le="0.02"}}') == 4
    assert rig.value(f'{itl}_bucket{{le="+Inf"}}') == rig.value(f"{itl}_count") == 4
    assert rig.value('kvpull_epp_answers_total{usage="read"}') == 1


async def test_a_whole_answer_has_no_gaps() -> None:
    rig = await finish(Outcome(200, "x", 100, 1, None, completed=True))
    assert rig.value("llm_d_epp_request_output_tokens_count") == 1
    for name in ("streaming_tpot_seconds", "streaming_itl_seconds", "cached_tokens"):
        assert rig.value(f"llm_d_epp_request_{name}_count") == 0


async def test_an_answer_without_usage_is_counted_not_guessed() -> None:
    rig = await finish(Outcome(200, completed=True))
    assert rig.value('kvpull_epp_answers_total{usage="unread"}') == 1
    for name in ("input_tokens", "output_tokens", "cached_tokens", "ntpot_seconds"):
        assert rig.value(f"llm_d_epp_request_{name}_count") == 0


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(500, None, 100, 5, 64, completed=True),
        Outcome(None, None, 100, 5, 64, completed=True),
        Outcome(200, None, 100, 5, 64, completed=False),
    ],
)
async def test_failed_and_broken_answers_report_no_tokens(outcome: Outcome) -> None:
    rig = await finish(outcome)
    assert rig.value("llm_d_epp_request_input_tokens_count") == 0
    assert rig.value('kvpull_epp_answers_total{usage="read"}') == 0
    assert rig.value("llm_d_epp_request_duration_seconds_sum") == 2.0


async def test_request_sizes_are_those_on_the_wire() -> None:
    rig = Rig()
    body = gzip.compress(json.dumps({"model": BASE, "prompt": "Hello " * 2000}).encode())
    await rig.route({}, body=body, headers=(("content-encoding", "gzip"),))
    assert rig.requests[-1].prompt_tokens > 2000
    assert rig.value("llm_d_epp_request_size_bytes_sum") == len(body)


def test_what_a_gateway_keeps_from_us_is_counted_by_kind() -> None:
    registry = CollectorRegistry()
    registry.register(DegradedCollector(lambda: {Degradation.ENCODED_RESPONSE: 3}))
    page = generate_latest(registry).decode()
    assert 'kvpull_epp_degraded_total{what="encoded_response"} 3.0' in page
    assert 'kvpull_epp_degraded_total{what="no_response_body"} 0.0' in page
