"""The picker in virtual time: decisions that may not change by themselves, and when nothing is pulled."""

from __future__ import annotations

import pytest

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.thresholds import PullSettings
from epp.core.types import ClaimState
from simulator.calibration import load_model
from simulator.clients import RateStages
from simulator.experiment import (
    Experiment,
    experiment_names,
    load_experiment,
    load_policy,
    run_fleet,
    varied_profile,
)
from simulator.fleet import Fleet
from simulator.requests import Record
from tests.unit.simulator.golden import AFFINITY_DECISIONS, LOAD_FIRST_DECISIONS
from tests.unit.simulator.world import AFFINITY, LOAD_FIRST, PROFILE, ask, fleet, text

TOKENS = 20_000


def busy_everywhere_but(several: Fleet, endpoint: str) -> None:
    """Load on every other endpoint: the next decision by load goes to `endpoint`."""
    for endpoint_id in several.engines:
        if endpoint_id.pod != endpoint:
            several.picker.ledger.book(
                f"busy {endpoint_id}",
                serving=endpoint_id,
                computing=endpoint_id,
                source=None,
                uncached_prompt_tokens=1000,
            )


def free(several: Fleet) -> None:
    for endpoint_id in several.engines:
        several.picker.ledger.release(f"busy {endpoint_id}")


def ask_on(several: Fleet, endpoint: str, number: int, tokens: int = TOKENS) -> Record:
    """Placement chooses `endpoint`, because all others are busy."""
    busy_everywhere_but(several, endpoint)
    record = ask(several, text(number, tokens + 8))
    free(several)
    assert record.computing == endpoint
    return record


# --- negative controls --------------------------------------------------------------------------------
def test_a_remote_copy_is_pulled_where_placement_leaves_its_holder() -> None:
    """The positive control of all that follow."""
    two = fleet()
    ask_on(two, "engine-0000", 1)
    record = ask_on(two, "engine-0001", 1)
    assert (record.source, record.pulled_tokens) == ("engine-0000", 19_968)
    assert two.network.moved_bytes == record.pulled_bytes


def test_a_local_hit_moves_nothing() -> None:
    two = fleet()
    ask_on(two, "engine-0000", 1)
    record = ask_on(two, "engine-0000", 1)
    assert (record.source, record.device_hit_tokens, two.network.moved_bytes) == ("", 19_968, 0.0)


def test_a_restore_from_the_own_cpu_tier_is_not_a_pull() -> None:
    two = fleet()
    for number in range(1, 13):
        ask_on(two, "engine-0000", number)  # 240,000 tokens through a device tier of 200,000
    record = ask_on(two, "engine-0000", 1)
    assert (record.device_hit_tokens, record.restored_tokens, record.source) == (0, 19_968, "")
    assert two.network.moved_bytes == 0.0


def test_a_restarted_index_names_no_source_until_it_has_heard_something() -> None:
    two = fleet()
    ask_on(two, "engine-0000", 1)
    for endpoint_id in two.engines:
        two.picker.remove_endpoint(endpoint_id)  # what a restarted picker knows: nothing
    for endpoint_id, engine in two.engines.items():
        two._back(endpoint_id)
        assert engine.alive
        assert two.picker.cache.state(endpoint_id) is ClaimState.LIVE
    record = ask_on(two, "engine-0001", 1)
    assert (record.source, record.reason) == ("", "no_holder")
    assert two.network.moved_bytes == 0.0


def test_an_unknown_prefix_is_computed_once_and_reused_later() -> None:
    two = fleet()
    first = ask_on(two, "engine-0000", 1)
    assert (first.computed_tokens, first.reason) == (TOKENS, "no_holder")
    again = ask_on(two, "engine-0000", 1)
    assert again.computed_tokens == 32


def test_a_tie_with_the_destination_stays_local() -> None:
    two = fleet()
    ask_on(two, "engine-0000", 1)
    ask_on(two, "engine-0001", 1)  # a pull: now both hold it
    moved = two.network.moved_bytes
    for _ in range(4):
        record = ask_on(two, "engine-0001", 1)
        assert record.source == ""
        assert record.reason in ("local_best", "below_delta")
    assert two.network.moved_bytes == moved


def test_thresholds_switch_pulls_off() -> None:

    two = Fleet(fleet().shape, PROFILE, parse_config(LOAD_FIRST, "test"), PullSettings(enabled=False))
    ask_on(two, "engine-0000", 1)
    record = ask_on(two, "engine-0001", 1)
    assert (record.reason, two.network.moved_bytes) == ("switched_off", 0.0)


# --- life ------------------------------------------------------------------------------------------------
def test_a_restarted_engine_comes_back_empty_and_its_requests_fail() -> None:
    two = fleet()
    ask_on(two, "engine-0000", 1)
    now_s = two.timeline.now_s
    busy_everywhere_but(two, "engine-0000")
    long = text(2, 60_008)
    two.timeline.at(now_s, two.submit, long, 60_000, 8)
    two.timeline.at(now_s + 0.5, two.restart, EndpointId("engine-0000"), 10.0)
    two.run()
    free(two)
    assert two.records[-1].failed == "restart"
    assert two.timeline.now_s >= now_s + 10.5
    record = ask_on(two, "engine-0000", 1)
    assert (record.device_hit_tokens, record.computed_tokens) == (0, TOKENS)
    two.check()


def test_nobody_to_serve_fails_the_request_and_nothing_else() -> None:
    one = fleet(engines=1)
    one.timeline.at(0.0, one.restart, EndpointId("engine-0000"), 5.0)
    content = text(1, 1008)
    one.timeline.at(1.0, one.submit, content, 1000, 8)
    one.run()
    assert [r.failed for r in one.records] == ["no_endpoint"]
    assert ask(one, content).latency_s is not None
    one.check()


def test_prefill_and_decode_on_different_endpoints_hand_over_the_prompt() -> None:

    shape = fleet(engines=2, roles={"prefill": 1, "decode": 1}).shape
    pair = Fleet(shape, PROFILE, load_policy("pd"))
    record = ask(pair, text(1, TOKENS + 8))
    assert (record.computing, record.endpoint) == ("engine-0000", "engine-0001")
    decode = pair.engines[EndpointId("engine-0001")]
    assert decode.computed_tokens == 32  # the last block; the rest came over
    assert pair.network.moved_bytes == 19_968 * PROFILE.kv_bytes_per_token
    assert (record.pulled_tokens, record.pulled_bytes) == (0, 0.0)  # a hand-over is no pull
    pair.check()


def test_under_pd_a_prefill_endpoint_pulls_what_a_decoder_made() -> None:

    shape = fleet(engines=2, roles={"prefill": 1, "decode": 1}).shape
    pair = Fleet(shape, PROFILE, load_policy("pd-p2p"))
    ask(pair, text(1, TOKENS + 3_000), 3_000)  # a long answer: its blocks are the decoder's alone
    record = ask(pair, text(1, TOKENS + 4_000), 8)
    assert record.source == "engine-0001"
    assert record.pulled_tokens == 3_008  # 359 whole blocks of prompt and answer; 312 were here
    pair.check()


# --- the same seed, the same bytes; a change of policy shows itself -----------------------------------------
POOL = RateStages(
    prefixes=6, prefix_tokens=4096, question_tokens=64, output_tokens=16, rates_per_s=(20.0,), stage_s=2.0
)


def pool_run(config: str, seed: int) -> Fleet:
    several = fleet(config, engines=3, seed=seed)
    POOL.run(several, seed)
    several.check()
    return several


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    one, two, other = pool_run(AFFINITY, 7), pool_run(AFFINITY, 7), pool_run(AFFINITY, 8)
    assert one.decisions == two.decisions
    assert repr(one.records) == repr(two.records)
    assert repr(one.records) != repr(other.records)


def decisions_of(config: str) -> list[str]:
    return [line.replace("engine-000", "") for line in pool_run(config, 1).decisions[:24]]


def test_golden_decisions() -> None:
    """If a change of policy is wanted, replace the lines; if not, this has found one."""

    assert decisions_of(AFFINITY) == AFFINITY_DECISIONS
    assert decisions_of(LOAD_FIRST) == LOAD_FIRST_DECISIONS


@pytest.mark.parametrize("name", experiment_names())
def test_every_committed_variant_can_be_run(name: str) -> None:
    spec = load_experiment(name)
    profile = load_model(spec.model).profile
    for changes in spec.variants.values():
        assert spec.varied(changes).fleet.shape().engines == spec.fleet.engines
        varied_profile(profile, spec.model_changes | changes.get("model", {}))


def test_a_variant_changes_what_it_names_and_nothing_else() -> None:
    spec = Experiment.model_validate(
        {
            "title": "t",
            "source": "s",
            "protocol": "p",
            "model": "gpt-oss-120b",
            "fleet": {"engines": 2, "gateway_s": 0.0},
            "client": {
                "kind": "rates",
                "prefixes": 2,
                "prefix_tokens": 4096,
                "question_tokens": 64,
                "output_tokens": 8,
                "rates_per_s": [5],
                "stage_s": 1,
            },
            "arms": {"load": "load"},
            "seeds": 1,
            "variants": {"slow gateway": {"fleet": {"gateway_s": 1.0}}},
        }
    )
    (_, plain), (_, slow) = run_fleet(spec, "load", 1), run_fleet(spec, "load", 1, "slow gateway")
    first, second = plain[0].records[0], slow[0].records[0]
    assert first.sent_s == second.sent_s
    assert second.ttft_s == pytest.approx((first.ttft_s or 0.0) + 1.0)
