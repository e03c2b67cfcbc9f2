"""Prefetch of a session's next turn: what is ordered, and every guard that keeps it from being ordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core import next_turn
from epp.core.errors import ConfigError
from epp.core.next_turn import Ahead, NextTurns, PrefetchSettings
from epp.core.types import (
    Candidate,
    InflightLoad,
    KvSource,
    Outcome,
    SchedulingRequest,
    SourceChoice,
    SourceReason,
)
from tests.unit.core.rows import BLOCK, candidate, info
from tests.unit.core.test_endpoint_picker import BLOCKS, PROMPT, Pool

DONE = Outcome(status=200, completed=True)
TOKENS = BLOCK * BLOCKS
TOKEN_BYTES = 1_000.0
SETTINGS = PrefetchSettings(min_tokens=1_000, bytes_per_s=0.0, burst_bytes=1e9, bytes_per_token=TOKEN_BYTES)
HOLDER = candidate("h", blocks=BLOCKS, requests=1, engine=info(instance="h", p2p_addr="10.0.0.1:7777"))
TARGET = candidate("t", engine=info(instance="t", p2p_addr="10.0.0.2:7777"))


def turns(**changed: Any) -> NextTurns:
    return NextTurns(replace(SETTINGS, **changed), lambda headers: headers.get("x-session-id"))


def asked(session: str | None = "s", tokens: int | None = TOKENS + 5) -> SchedulingRequest:
    headers = {"x-session-id": session} if session else {}
    return SchedulingRequest(
        "r", "m", None if tokens is None else range(tokens), cache_salt="salt", headers=headers
    )


def ahead(
    holder: Candidate = HOLDER,
    target: Candidate = TARGET,
    gain: int = TOKENS,
    source: Candidate | None = None,
    token_bytes: float | None = None,
) -> Ahead:
    row = source or holder
    named = KvSource(row.endpoint, gain, gain) if gain else None
    choice = SourceChoice(named, SourceReason.PULL if named else SourceReason.BELOW_DELTA)
    rows = [holder, target] if source is None else [holder, target, source]
    return Ahead(target, choice, rows, token_bytes)


def end(
    made: NextTurns,
    found: Ahead | None = None,
    *,
    turn: str = "d1",
    outcome: Outcome = DONE,
    now_s: float = 0.0,
) -> list[next_turn.PrefetchAsk]:
    made.ended(turn, HOLDER.endpoint.id, outcome, now_s, lambda _: found if found is not None else ahead())
    return made.take()


def test_the_holder_of_a_session_that_would_move_is_told_to_give() -> None:
    made = turns()
    made.placed("d1", asked())
    (ask,) = end(made)
    assert (ask.order_id, str(ask.source), str(ask.target)) == ("d1", "h/0", "t/0")
    assert (ask.source_address, ask.target_address) == ("10.0.0.1:7777", "10.0.0.2:7777")
    assert (list(ask.token_ids), ask.cache_salt) == (list(range(TOKENS)), "salt")
    assert (ask.gain_tokens, ask.size_bytes) == (TOKENS, TOKENS * TOKEN_BYTES)
    assert made.take() == []
    assert (dict(made.skipped), len(made)) == ({}, 0)


def with_load(row: Candidate, **load: int) -> Candidate:
    return row._replace(load=InflightLoad(**load))


def waits(row: Candidate, waiting: float | None) -> Candidate:
    return row._replace(metrics=replace(row.metrics, waiting_requests=waiting))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (ahead(target=HOLDER), next_turn.STAYS),
        (ahead(target=with_load(TARGET, requests=1)), next_turn.STAYS),  # not less busy
        (ahead(gain=0), next_turn.NO_SOURCE),
        (ahead(gain=999), next_turn.NO_SOURCE),  # not worth an order
        (ahead(holder=waits(HOLDER, 1.0)), next_turn.SOURCE_BUSY),
        (ahead(holder=waits(HOLDER, None)), next_turn.SOURCE_BUSY),  # unknown
        (ahead(holder=with_load(HOLDER, requests=1, pulls_served=1)), next_turn.SOURCE_BUSY),
        (ahead(holder=with_load(HOLDER, requests=1, uncached_prompt_tokens=9)), next_turn.SOURCE_BUSY),
        (ahead(target=candidate("t")), next_turn.NO_ADDRESS),
    ],
)
def test_a_guard_keeps_it(found: Ahead, reason: str) -> None:
    made = turns()
    made.placed("d1", asked())
    assert end(made, found) == []
    assert dict(made.skipped) == {reason: 1}


def test_what_is_no_turn_of_a_session_is_not_even_remembered() -> None:
    made = turns()
    for request in (asked(session=None), asked(tokens=None), asked(tokens=999)):
        made.placed("d1", request)
        assert len(made) == 0
    assert end(made) == []
    assert dict(made.skipped) == {}


@pytest.mark.parametrize("outcome", [Outcome(status=500, completed=True), Outcome(status=200), Outcome()])
def test_a_turn_that_failed_has_no_next_one(outcome: Outcome) -> None:
    made = turns()
    made.placed("d1", asked())
    assert end(made, outcome=outcome) == []
    assert dict(made.skipped) == {next_turn.FAILED: 1}


def test_a_session_with_another_request_under_way_is_left_alone() -> None:
    made = turns()
    made.placed("d1", asked())
    made.placed("d2", asked())
    assert end(made) == []
    assert dict(made.skipped) == {next_turn.OPEN: 1}
    assert len(end(made, turn="d2")) == 1


def test_one_order_of_a_source_at_a_time_and_so_many_in_all() -> None:
    made = turns(max_in_flight=2, orders_per_s=100.0)
    other = candidate("o", blocks=BLOCKS, engine=info(instance="o", p2p_addr="10.0.0.3:7777"))
    third = candidate("q", blocks=BLOCKS, engine=info(instance="q", p2p_addr="10.0.0.4:7777"))
    for n in range(1, 6):
        made.placed(f"d{n}", asked(f"s{n}"))
    assert len(end(made)) == 1
    assert end(made, turn="d2") == []
    assert len(end(made, ahead(source=other), turn="d3")) == 1
    assert end(made, ahead(source=third), turn="d4") == []
    assert dict(made.skipped) == {next_turn.SOURCE_BUSY: 1, next_turn.IN_FLIGHT: 1}
    made.finished("d1")
    assert len(end(made, turn="d5")) == 1


def test_an_order_that_nobody_ends_is_given_up() -> None:
    made = turns(max_in_flight=1, deadline_s=5.0, orders_per_s=100.0)
    for n in (1, 2, 3):
        made.placed(f"d{n}", asked(f"s{n}"))
    assert len(end(made)) == 1
    assert end(made, turn="d2", now_s=5.9) == []
    assert len(end(made, turn="d3", now_s=6.0)) == 1


def test_bytes_are_budgeted_by_what_pulls_have_shown() -> None:
    size = TOKENS * TOKEN_BYTES
    made = turns(burst_bytes=1.5 * size, bytes_per_s=size, orders_per_s=100.0)
    for n in (1, 2, 3, 4):
        made.placed(f"d{n}", asked(f"s{n}"))
    assert len(end(made)) == 1
    made.finished("d1")
    assert end(made, turn="d2") == []
    assert dict(made.skipped) == {next_turn.BYTES: 1}
    (ask,) = end(made, ahead(token_bytes=TOKEN_BYTES / 4), turn="d3")  # learned outranks configured
    assert ask.size_bytes == size / 4
    made.finished("d3")
    assert len(end(made, turn="d4", now_s=1.0)) == 1


def test_without_a_size_nothing_is_ordered() -> None:
    made = turns(bytes_per_token=0.0)
    made.placed("d1", asked())
    assert end(made) == []
    assert dict(made.skipped) == {next_turn.BYTES: 1}


def test_tokens_of_running_turns_are_bounded() -> None:
    made = turns(max_tracked_tokens=2 * (TOKENS + 5))
    for n in range(3):
        made.placed(f"d{n}", asked(f"s{n}"))
    assert len(made) == 2
    made.ended("d0", HOLDER.endpoint.id, Outcome(), 0.0, lambda _: None)
    made.placed("d3", asked("s3"))
    assert len(made) == 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 3), st.booleans()), max_size=60),
    st.floats(0.1, 5.0),
    st.floats(1.0, 4.0),
)
def test_neither_rate_is_ever_exceeded(
    steps: list[tuple[float, int, bool]], orders_per_s: float, burst_orders: float
) -> None:
    """Whatever ends when: orders and bytes stay within rate x time + burst, one source serves one order."""
    size = TOKENS * TOKEN_BYTES
    made = turns(
        orders_per_s=orders_per_s, bytes_per_s=size, burst_bytes=burst_orders * size, max_in_flight=3
    )
    sources = [
        candidate(f"s{n}", blocks=BLOCKS, engine=info(instance=f"s{n}", p2p_addr=f"10.0.1.{n}:7777"))
        for n in range(4)
    ]
    now_s, ordered, open_orders = 0.0, 0, {}
    for number, (gap_s, source, finish) in enumerate(steps):
        now_s += gap_s
        made.placed(f"d{number}", asked(f"s{number}"))
        for ask in end(made, ahead(source=sources[source]), turn=f"d{number}", now_s=now_s):
            ordered += 1
            alive = {o: s for o, (s, until_s) in open_orders.items() if until_s > now_s}
            assert ask.source not in alive.values()
            assert len(alive) < 3
            open_orders[ask.order_id] = (ask.source, now_s + SETTINGS.deadline_s + 1.0)
        if finish and open_orders:
            done = next(iter(open_orders))
            made.finished(done)
            del open_orders[done]
        assert ordered <= max(1.0, orders_per_s) + orders_per_s * now_s + 1e-6
        assert ordered <= burst_orders + now_s + 1e-6


# --- in the picker --------------------------------------------------------------------------------------
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {local: {path: any}}
- type: precise-prefix-cache-producer
- type: p2p-source-producer
  parameters: {minCachedTokenDelta: 100}
- type: active-request-scorer
- type: kvpull-next-turn-prefetcher
  parameters: {minTokens: 1000, bytesPerToken: 2000}
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins: [{pluginRef: active-request-scorer}]
"""


def engine_of(pod: str) -> dict[str, object]:
    return {"info": info(instance=pod, p2p_addr=f"10.1.0.{ord(pod)}:7777")}


def test_the_picker_orders_at_the_end_of_a_turn() -> None:
    """b holds the prompt and has another request: by load, the session would come back to another one."""
    pool = Pool(parse_config(CONFIG).settings)
    for pod in "abc":
        pool.metrics(pod, waiting=0.0, **engine_of(pod))
    pool.hold("b")
    for pod in "ac":
        pool.picker.ledger.book(
            f"busy-{pod}",
            serving=EndpointId(pod),
            computing=EndpointId(pod),
            source=None,
            uncached_prompt_tokens=0,
        )
    decision = pool.ask("turn", headers={"x-session-id": "s"})
    assert decision.destination.id.pod == "b"
    pool.picker.first_token(decision.decision_id)
    pool.picker.ledger.book(
        "busy-b", serving=EndpointId("b"), computing=EndpointId("b"), source=None, uncached_prompt_tokens=0
    )
    pool.picker.ledger.release("busy-a")
    pool.picker.release(decision.decision_id, DONE)
    assert pool.picker.next_turns is not None
    (ask,) = pool.picker.next_turns.take()
    assert (str(ask.source), str(ask.target), ask.gain_tokens) == ("b/0", "a/0", TOKENS)
    assert list(ask.token_ids) == PROMPT[:TOKENS]
    assert ask.size_bytes == TOKENS * 2_000
    load = pool.picker.ledger.load(EndpointId("a"))
    assert (load.requests, len(pool.picker.ledger)) == (0, 2), "looking ahead books nothing"


def test_one_prefetcher_is_enough() -> None:
    second = "- {type: kvpull-next-turn-prefetcher, name: again}\n- type: max-score-picker"
    with pytest.raises(ConfigError, match="one of 2 prefetchers"):
        parse_config(CONFIG.replace("- type: max-score-picker", second, 1))
