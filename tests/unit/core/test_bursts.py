"""Many requests inside one scrape interval: what this picker has sent itself counts at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.cache_view import CacheView
from epp.core.disagg import SingleProfileHandler
from epp.core.endpoint_picker import EndpointPicker, PickerSettings
from epp.core.errors import NoEndpoints
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.scheduler import Profile
from epp.core.types import Endpoint, EndpointMetrics, SchedulingRequest
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.saturation import ConcurrencyDetector
from epp.plugins.scorers import ActiveRequestScorer, QueueScorer, TokenLoadScorer
from tests.unit.core.test_endpoint_picker import PROMPT, Pool

PICKER = MaxScorePicker("max")
SPREAD = 1.5  # busiest over even, for a burst that sees frozen metrics


def profile(*scorers: tuple[object, float]) -> PickerSettings:
    return PickerSettings(SingleProfileHandler(Profile("p", (), scorers, PICKER)))  # type: ignore[arg-type]


def pool_of(count: int, settings: PickerSettings) -> EndpointPicker:
    """The first one looks idle, the others have a short queue; nothing is scraped any more."""
    picker = EndpointPicker(settings, CacheView(PythonPrefixIndex(bytes(16))))
    for number in range(count):
        endpoint = Endpoint(EndpointId(f"e{number}"), f"10.0.0.{number}", 8000)
        picker.upsert_endpoint(endpoint)
        picker.update_metrics(endpoint.id, EndpointMetrics(0.0, min(number, 1), 0.0, 0.1, 16))
    return picker


@pytest.mark.parametrize(
    "own", [ActiveRequestScorer("own"), TokenLoadScorer("own", 200_000)], ids=["requests", "tokens"]
)
def test_a_burst_does_not_follow_frozen_metrics(own: object) -> None:
    """S-D03."""
    picker = pool_of(8, profile((QueueScorer("queue"), 1.0), (own, 4.0)))
    sent = Counter(
        picker.schedule(SchedulingRequest(f"r{n}", token_ids=range(1_000)), 0.2, f"d{n}").destination.id
        for n in range(800)
    )
    # the one that looks idle is ahead by its queue's worth, and the rest shares evenly
    assert max(sent.values()) == sent[EndpointId("e0")] < SPREAD * 800 / 8
    others = [sent[EndpointId(f"e{number}")] for number in range(1, 8)]
    assert min(others) > 0.7 * 800 / 8
    assert max(others) <= min(others) + 2


def test_negative_control_metrics_alone_send_the_burst_to_one() -> None:
    picker = pool_of(8, profile((QueueScorer("queue"), 1.0)))
    sent = {picker.schedule(SchedulingRequest(f"r{n}"), 0.2, f"d{n}").destination.id.pod for n in range(50)}
    assert sent == {"e0"}


def test_equal_holders_share_a_burst_evenly() -> None:
    """S-D04: pick and count are one step."""
    pool = Pool()
    for pod in "abc":
        pool.hold(pod)
    sent = Counter(
        pool.picker.schedule(SchedulingRequest(f"r{n}", token_ids=PROMPT), 0.0, f"d{n}").destination.id
        for n in range(66)
    )
    assert set(sent.values()) == {22}


def test_an_empty_pool_is_no_saturated_one() -> None:
    """S-D06: 503, never 429."""
    picker = EndpointPicker(profile(), CacheView(PythonPrefixIndex(bytes(16))))
    assert picker.saturation(ConcurrencyDetector("d"), 0.0) is None
    with pytest.raises(NoEndpoints) as caught:
        picker.schedule(SchedulingRequest("r"), 0.0, "1")
    assert caught.value.status == 503
    assert len(picker.ledger) == 0


def test_a_long_stream_keeps_its_place_whatever_else_ends() -> None:
    """S-D08: nothing but the end of a stream gives capacity back."""
    detector = ConcurrencyDetector("d", max_requests=1)
    pool = Pool()
    long_ones = [pool.picker.schedule(SchedulingRequest(f"l{n}"), 0.0, f"l{n}") for n in range(3)]
    assert pool.picker.saturation(detector, 0.0) == 1.0
    for n in range(5_000):  # more than the ring of decisions remembers
        pool.picker.schedule(SchedulingRequest(f"r{n}"), float(n), f"d{n}")
        pool.picker.release(f"d{n}")
    pool.picker.expire(6 * 3_600.0)
    assert pool.picker.saturation(detector, 6 * 3_600.0) == 1.0
    for decision in long_ones:
        assert pool.picker.release(decision.decision_id)
    assert pool.picker.saturation(detector, 6 * 3_600.0) == 0.0
    pool.picker.ledger.check_integrity()


def test_the_default_profile_spreads_a_burst_of_cold_prompts() -> None:
    """Nothing configured at all: ties are spread by the request's own generator."""
    config = parse_config("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n")
    picker = pool_of(4, replace(config.settings))
    for number in range(4):
        picker.update_metrics(EndpointId(f"e{number}"), EndpointMetrics(0.0, 0.0, 0.0, 0.1, 16))
    sent = Counter(
        picker.schedule(
            SchedulingRequest(f"r{n}", token_ids=range(n * 10_000, n * 10_000 + 640)), 0.1, f"d{n}"
        ).destination.id
        for n in range(400)
    )
    assert len(sent) == 4
    assert max(sent.values()) < 2 * min(sent.values())
