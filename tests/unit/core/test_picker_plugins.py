"""What the picker does for plugins: followers, headers, saturation, load of prompts without tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.core.disagg import DisaggProfileHandler
from epp.core.errors import NoEndpoints
from epp.core.load_ledger import LoadEstimate
from epp.core.scheduler import Profile
from epp.core.types import Candidate, Endpoint, ScheduleContext, SchedulingRequest
from epp.plugins.deciders import AlwaysDisaggDecider
from epp.plugins.filters import decode_filter, prefill_filter
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.plugin_type import PRECISE
from epp.plugins.saturation import ConcurrencyDetector
from epp.plugins.topology import TopologyFilter
from tests.unit.core.test_endpoint_picker import SETTINGS, Pool

PICKER = MaxScorePicker("max")


class Follower:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, str]]] = []

    def placed(
        self, context: ScheduleContext, candidates: Sequence[Candidate], targets: Mapping[str, Candidate]
    ) -> Mapping[str, str]:
        self.seen.append((len(candidates), {n: c.endpoint.id.pod for n, c in targets.items()}))
        return {"x-sticky": context.request.request_id}


def handler(**changed: bool) -> DisaggProfileHandler:
    return DisaggProfileHandler(
        Profile("decode", (decode_filter("d"),), (), PICKER),
        Profile("prefill", (prefill_filter("p"),), (), PICKER),
        None if changed.get("prefill_first") else AlwaysDisaggDecider("always"),
        **changed,
    )


def by_role(pool: Pool, **roles: str) -> Pool:
    for number, (pod, role) in enumerate(roles.items()):
        labels = {"llm-d.ai/role": role, "topology.kubernetes.io/zone": f"z{number % 2}"}
        pool.picker.upsert_endpoint(Endpoint(EndpointId(pod), f"10.0.0.{number}", 8000, labels))
    return pool


def test_followers_hear_of_both_stages_and_headers_come_back() -> None:
    follower = Follower()
    settings = replace(SETTINGS, handler=handler(), followers=(follower,))
    pool = by_role(Pool(settings), a="prefill", b="decode", c="decode")
    decision = pool.picker.schedule(SchedulingRequest("r"), 0.0, "1")
    decode = decision.destination.id.pod
    assert follower.seen == [(3, {"decode": decode, "prefill": "a"})]
    assert decision.response_headers == (("x-sticky", "r"),)


@pytest.mark.parametrize("prefill_first", [True, False])
def test_without_a_prefill_endpoint_it_is_the_setting_that_decides(prefill_first: bool) -> None:
    """S-D12: either is visible."""
    for alone in (True, False):
        settings = replace(SETTINGS, handler=handler(prefill_first=prefill_first, may_decode_alone=alone))
        pool = by_role(Pool(settings), a="decode", b="decode", c="decode")
        if not alone:
            with pytest.raises(NoEndpoints, match="profile prefill"):
                pool.picker.schedule(SchedulingRequest("r"), 0.0, "1")
            continue
        decision = pool.picker.schedule(SchedulingRequest("r"), 0.0, "1")
        assert decision.prefill_missing
        assert decision.prefill is None
        assert decision.computing == decision.destination.id


def test_prefill_first_lets_the_decode_stage_know_its_peer() -> None:
    decode = Profile("decode", (decode_filter("d"), TopologyFilter("near", "zone")), (), PICKER)
    first = replace(handler(prefill_first=True), decode=decode)
    pool = by_role(Pool(replace(SETTINGS, handler=first)), a="prefill", b="decode", c="decode")
    for n in range(20):  # a and c are in one zone
        decision = pool.picker.schedule(SchedulingRequest(f"r{n}"), 0.0, f"d{n}")
        assert decision.destination.id.pod == "c"
        assert decision.prefill is not None
        assert decision.prefill.id.pod == "a"


def test_the_fuller_stage_is_the_saturation_of_the_pool() -> None:
    detector = ConcurrencyDetector("d", max_requests=4)
    pool = by_role(Pool(replace(SETTINGS, handler=handler())), a="prefill", b="decode", c="decode")
    assert pool.picker.saturation(detector, 0.0) == 0.0
    pool.picker.schedule(SchedulingRequest("r"), 0.0, "1")
    assert pool.picker.saturation(detector, 0.0) == 1 / 4  # prefill: 1 of 4; decode: 1 of 8
    assert pool.picker.saturation(detector, 0.0, unbooked=2) == 3 / 4
    for pod in "abc":
        pool.picker.remove_endpoint(EndpointId(pod))
    assert pool.picker.saturation(detector, 0.0) is None


@pytest.mark.parametrize(
    ("changed", "tokens"),
    [
        ({"token_ids": range(5_000)}, 5_000),
        ({"pieces": range(700)}, 700),
        ({"size_bytes": 4_000}, 1_000),  # a guess is better than nothing
        ({}, 0),
    ],
)
def test_load_is_counted_for_every_request(changed: dict[str, object], tokens: int) -> None:
    pool = Pool()
    request = replace(SchedulingRequest("r"), **changed)  # type: ignore[arg-type]
    decision = pool.picker.schedule(request, 0.0, "1")
    assert pool.picker.ledger.load(decision.destination.id).tokens == tokens
    pool.picker.first_token("1")
    assert pool.picker.ledger.load(decision.destination.id).tokens == 0


@pytest.mark.parametrize(("most", "output"), [(None, 1_500), (100, 100)])
def test_estimated_output_counts_until_the_end(most: int | None, output: int) -> None:
    pool = Pool(replace(SETTINGS, estimate=LoadEstimate(PRECISE, 1.5, most)))
    decision = pool.picker.schedule(SchedulingRequest("r", token_ids=range(1_000)), 0.0, "1")
    load = pool.picker.ledger.load
    assert load(decision.destination.id).tokens == 1_000 + output
    pool.picker.ledger.check_integrity()
    pool.picker.first_token("1")
    assert load(decision.destination.id).tokens == output
    pool.picker.release("1")
    assert load(decision.destination.id).tokens == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_nonsense_in_metrics_is_unknown(value: float) -> None:
    """S-D05."""
    pool = Pool()
    pool.metrics("a", waiting=value, running_requests=value, kv_usage=value)
    (row,) = [r.candidate for r in pool.picker.snapshot(0.0) if r.candidate.endpoint.id.pod == "a"]
    assert row.metrics.waiting_requests is None
    assert row.metrics.running_requests is None
    assert row.metrics.kv_usage is None
    assert row.metrics.scraped_at_s == 0.0


def test_another_configuration_is_in_force_with_the_next_request() -> None:
    pool = Pool()
    pool.ask()
    first = replace(SETTINGS, handler=handler(may_decode_alone=True), source_producer=None)
    pool.picker.apply(first)
    decision = pool.picker.schedule(SchedulingRequest("r", token_ids=range(100)), 0.0, "9")
    assert decision.prefill_missing
    assert decision.choice.reason.value == "not_configured"
    assert len(pool.picker.ledger) == 2


def test_ties_and_chance_repeat_for_the_same_request() -> None:
    """A recorded decision can be made again."""
    picked = {Pool().picker.schedule(SchedulingRequest("r"), 0.0, "1").destination.id for _ in range(5)}
    assert len(picked) == 1
    assert random.Random("r").random() == random.Random("r").random()
