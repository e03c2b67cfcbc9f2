"""Newcomers, and pickers that restart: what they hold and know afterwards, in tokens and states."""

from __future__ import annotations

import pytest

from engine_plugin.identity import EndpointId
from epp.core.types import ClaimState
from simulator.experiment import Experiment, run_job
from simulator.fleet import Fleet
from simulator.incidents import Join, PickerRestart, time_to_reuse_s
from simulator.requests import Record
from tests.unit.simulator.test_fleet import ask_on
from tests.unit.simulator.world import ask, fleet, text

TOKENS = 20_000
FIRST = EndpointId("engine-0000")


def restarted(memory: str, batches: int = 10_000) -> tuple[Fleet, Record]:
    """One engine holds a prompt and then others; the picker restarts; the prompt is asked for again."""
    one = fleet(engines=1)
    one.keep_batches(batches)
    for number in range(1, 5):
        ask(one, text(number, TOKENS + 8))
    one.restart_picker(2.0, memory)
    record = ask(one, text(1, TOKENS + 8))
    one.check()
    return one, record


def matched_tokens(one: Fleet, number: int) -> int:
    """What the picker knows of a prompt."""
    from epp.core.types import SchedulingRequest

    request = SchedulingRequest("look", "", text(number, TOKENS).tokens)
    return one.picker.cache.match(request, [FIRST])[FIRST].cached_tokens


@pytest.mark.parametrize(
    ("memory", "batches", "state", "known"),
    [
        ("snapshot", 10_000, ClaimState.LIVE, 19_968),
        ("replay", 10_000, ClaimState.LIVE, 19_968),
        ("replay", 2, ClaimState.PARTIAL, 0),  # the buffer has forgotten the first prompt
        ("nothing", 10_000, ClaimState.UNKNOWN, 0),  # no source is named until something new is heard
    ],
)
def test_what_the_next_picker_knows(memory: str, batches: int, state: ClaimState, known: int) -> None:
    one, record = restarted(memory, batches)
    assert record.first_token_s is not None
    assert record.ttft_s is not None
    assert record.ttft_s > 2.0  # it waited for the picker
    assert record.device_hit_tokens == 19_968  # the engine has forgotten nothing
    assert matched_tokens(one, 2) == known
    assert one.picker.cache.state(FIRST) is state


def test_a_request_waits_for_the_next_picker_and_is_placed_once() -> None:
    one = fleet(engines=1)
    one.restart_picker(5.0, "replay")
    record = ask(one, text(1, TOKENS + 8))
    assert len(one.decisions) == 1
    assert record.first_token_s is not None
    assert record.first_token_s > 5.0


def record(at_s: float, held: int, pulled: int = 0) -> Record:
    return Record("r", "", at_s, 100, 1, device_hit_tokens=held, pulled_tokens=pulled)


def test_time_to_reuse_is_the_end_of_the_first_full_bin_that_reuses_enough() -> None:
    cold = [record(10.0 + n, 0) for n in range(3)]
    pulling = [record(15.5 + n, 0, 90) for n in range(3)]
    warm = [record(20.5 + n, 90) for n in range(3)]
    lone = [record(12.0, 100)]
    assert time_to_reuse_s([*cold, *pulling, *warm], 10.0, 40.0, 0.8) == 10.0
    assert time_to_reuse_s([*cold, *pulling, *warm], 10.0, 40.0, 0.8, pulled=False) == 15.0
    assert time_to_reuse_s(cold, 10.0, 40.0, 0.8) == 30.0  # never: the whole time
    assert time_to_reuse_s(lone, 10.0, 40.0, 0.8) == 30.0  # one request proves nothing


def test_a_newcomer_is_served_by_pulls_and_its_figures_are_its_own() -> None:
    spec = Experiment.model_validate(
        {
            "title": "t",
            "source": "s",
            "protocol": "p",
            "model": "gpt-oss-120b",
            "fleet": {"engines": 2, "gateway_s": 0.0, "primed": True},
            "client": {
                "kind": "rates",
                "prefixes": 4,
                "prefix_tokens": 8192,
                "question_tokens": 64,
                "output_tokens": 64,
                "rates_per_s": [16],
                "stage_s": 30,
            },
            "join": {"at_s": 10},
            "arms": {"pulls": "load-p2p", "no pulls": {"policy": "load-p2p", "pulls": "no pulls"}},
            "seeds": 1,
        }
    )
    pulls, computes = (run_job(spec, arm, 1) for arm in ("pulls", "no pulls"))
    assert pulls["newcomer"]["join_pulled_gib"] > 0.5
    assert computes["newcomer"]["join_pulled_gib"] == 0.0
    assert pulls["16"]["pulled_gib"] >= pulls["newcomer"]["join_pulled_gib"]
    assert pulls["newcomer"]["join_time_to_reuse_s"] == 5.0
    assert 0.5 < pulls["newcomer"]["join_share"] < 1.5


def test_incidents_are_part_of_the_protocol() -> None:
    assert Join(at_s=3).engines == 1
    assert PickerRestart(at_s=1, down_s=2).replay_batches == 10_000


@pytest.mark.parametrize(("ahead", "end"), [(True, "ok"), (False, "deadline")])
def test_who_has_restarted_pulls_at_once_only_where_it_connects_ahead(ahead: bool, end: str) -> None:
    """A session takes 6 s to set up, longer than a pull may: the first one of a pair brings nothing."""
    two = fleet(keeps_connected=ahead)
    ask_on(two, "engine-0000", 1)
    two.restart(EndpointId("engine-0001"), 1.0)
    two.timeline.after(10.0, lambda: None)
    two.run()
    record = ask_on(two, "engine-0001", 1)
    assert (record.source, record.pull_end) == ("engine-0000", end)
    assert record.pulled_tokens == (19_968 if ahead else 0)
    two.check()
