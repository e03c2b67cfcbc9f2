"""The queue against a naive one: order, bands, bounds, expiry; nothing is lost and counts are true."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epp.core.flow.bands import BandSettings, Fairness, FlowSettings, Ordering, Ticket
from epp.core.flow.queue import FlowQueue, Refusal


def queue(**settings: Any) -> FlowQueue:
    return FlowQueue(FlowSettings(**settings))


def band(**settings: Any) -> dict[str, Any]:
    return {"default_band": BandSettings(**settings)}


def drained(waiting: FlowQueue, now_s: float = 0.0) -> str:
    taken = []
    while (ticket := waiting.take(now_s)) is not None:
        taken.append(ticket.id)
    return " ".join(taken)


def fill(waiting: FlowQueue, *tickets: Ticket) -> FlowQueue:
    for ticket in tickets:
        assert waiting.offer(ticket) is None
    return waiting


def test_who_came_first_goes_first() -> None:
    tickets = [Ticket("a", 2.0), Ticket("b", 1.0), Ticket("c", 1.0)]
    assert drained(fill(queue(), *tickets)) == "b c a"


def test_a_higher_priority_always_goes_first() -> None:
    tickets = [Ticket("low", 0.0, -1), Ticket("mid", 1.0, 0), Ticket("high", 2.0, 7), Ticket("mid2", 0.5, 0)]
    assert drained(fill(queue(), *tickets)) == "high mid2 mid low"


def test_whose_time_ends_first() -> None:
    waiting = queue(**band(ordering=Ordering.EDF))
    tickets = [
        Ticket("never", 0.0),
        Ticket("late", 1.0, expires_s=9.0),
        Ticket("soon", 2.0, expires_s=5.0),
        Ticket("soon2", 3.0, expires_s=5.0),
    ]
    assert drained(fill(waiting, *tickets)) == "soon soon2 late never"


def test_whose_first_token_is_due_first() -> None:
    waiting = queue(**band(ordering=Ordering.SLO_DEADLINE))
    tickets = [Ticket("none", 0.0), Ticket("b", 1.0, slo_due_s=4.0), Ticket("a", 2.0, slo_due_s=3.0)]
    assert drained(fill(waiting, *tickets)) == "a b none"


def flows(text: str, fairness: Fairness) -> str:
    """`text`: flows in the order of arrival; returns the order they were served in."""
    waiting = queue(**band(fairness=fairness))
    for number, flow in enumerate(text):
        fill(waiting, Ticket(f"{flow}{number}", float(number), flow=flow))
    return "".join(part[0] for part in drained(waiting).split())


def test_a_flow_that_asks_more_does_not_wait_less() -> None:
    assert flows("aaaaabbc", Fairness.GLOBAL_STRICT) == "aaaaabbc"
    assert flows("aaaaabbc", Fairness.ROUND_ROBIN) == "abcabaaa"


def test_the_least_served_flow_goes_first_and_what_was_served_is_forgotten() -> None:
    waiting = queue(**band(fairness=Fairness.PROGRAM_AWARE, half_life_s=10.0))
    waiting.note_served(0, "long", 1000, now_s=0.0)
    waiting.note_served(0, "short", 100, now_s=0.0)
    fill(waiting, Ticket("l", 0.0, flow="long"), Ticket("s", 1.0, flow="short"), Ticket("n", 2.0, flow="new"))
    assert drained(waiting) == "n s l"
    waiting.note_served(0, "short", 100, now_s=100.0)  # 1,000 tokens of 100 s ago are 1 now
    fill(waiting, Ticket("s2", 100.0, flow="short"), Ticket("l2", 101.0, flow="long"))
    assert drained(waiting, 100.0) == "l2 s2"


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        # served 1,000, 100 and 0 tokens, waiting 10, 9 and 0 s
        ((0.8, 0.2), "s n l"),  # as the reference by default: 0.90, 0.80, 0.20
        ((1.0, 0.0), "n s l"),
        ((0.0, 1.0), "l s n"),
    ],
)
def test_what_was_served_is_weighed_against_the_wait(weights: tuple[float, float], order: str) -> None:
    service, wait = weights
    waiting = queue(**band(fairness=Fairness.PROGRAM_AWARE, service_weight=service, wait_weight=wait))
    waiting.note_served(0, "long", 1000, now_s=0.0)
    waiting.note_served(0, "short", 100, now_s=0.0)
    tickets = (("l", 0.0, "long"), ("s", 1.0, "short"), ("n", 10.0, "new"))
    fill(waiting, *(Ticket(name, at_s, flow=flow) for name, at_s, flow in tickets))
    first = waiting.take(10.0)
    assert first is not None
    assert f"{first.id} {drained(waiting, 10.0)}" == order


def test_without_a_half_life_nothing_is_forgotten() -> None:
    waiting = queue(**band(fairness=Fairness.PROGRAM_AWARE, half_life_s=0.0, wait_weight=0.0))
    waiting.note_served(0, "long", 2, now_s=0.0)
    waiting.note_served(0, "short", 1, now_s=1e6)
    fill(waiting, Ticket("l", 0.0, flow="long"), Ticket("s", 1e6, flow="short"))
    assert drained(waiting, 1e6) == "s l"


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"max_requests": 2}, Refusal.TOTAL_REQUESTS),
        ({"max_bytes": 25}, Refusal.TOTAL_BYTES),
        (band(max_requests=2), Refusal.BAND_REQUESTS),
        (band(max_bytes=25), Refusal.BAND_BYTES),
    ],
)
def test_every_bound_is_kept_and_said(settings: dict[str, Any], refusal: Refusal) -> None:
    waiting = fill(queue(**settings), Ticket("a", 0.0, size_bytes=10), Ticket("b", 0.0, size_bytes=10))
    assert waiting.offer(Ticket("c", 0.0, size_bytes=10)) is refusal
    assert (len(waiting), waiting.bytes) == (2, 20)
    waiting.cancel("a")
    assert waiting.offer(Ticket("c", 0.0, size_bytes=10)) is None


def test_the_bounds_of_a_band_are_its_own() -> None:
    waiting = queue(
        bands={5: BandSettings(max_requests=1)}, default_negative_band=BandSettings(max_requests=0)
    )
    fill(waiting, Ticket("a", 0.0, 5), Ticket("b", 0.0, 0))
    assert waiting.offer(Ticket("c", 0.0, 5)) is Refusal.BAND_REQUESTS
    assert waiting.offer(Ticket("d", 0.0, -1)) is Refusal.BAND_REQUESTS
    fill(waiting, Ticket("e", 0.0, 1))


def test_expiry_names_each_once_and_in_time() -> None:
    waiting = fill(
        queue(), Ticket("a", 0.0, expires_s=5.0), Ticket("b", 0.0, expires_s=3.0), Ticket("c", 0.0)
    )
    assert [t.id for t in waiting.expire(2.9)] == []
    assert [t.id for t in waiting.expire(5.0)] == ["b", "a"]
    assert not list(waiting.expire(1e9)), "each once"
    assert drained(waiting) == "c"


def test_one_that_waits_is_not_taken_in_twice() -> None:
    waiting = fill(queue(), Ticket("a", 0.0))
    with pytest.raises(ValueError, match="waits already"):
        waiting.offer(Ticket("a", 0.0))


def test_those_who_went_away_cost_no_memory() -> None:
    waiting = fill(queue(), Ticket("first", 0.0, expires_s=1e9))
    for number in range(5000):
        fill(waiting, Ticket(str(number), 1.0, expires_s=1e9))
        assert waiting.cancel(str(number))
    assert len(waiting._expiries) < 200
    (band_flows,) = waiting._flows.values()
    assert len(band_flows._flows[""]._heap) < 100


class AgainstNaive(RuleBasedStateMachine):
    """Round robin and two bands, against a list."""

    def __init__(self) -> None:
        super().__init__()
        settings = BandSettings(max_requests=6, max_bytes=60, fairness=Fairness.GLOBAL_STRICT)
        self.queue = queue(max_requests=10, default_band=settings, default_negative_band=settings)
        self.naive: list[Ticket] = []
        self.number = 0
        self.now_s = 0.0

    @rule(
        priority=st.sampled_from([-1, 0, 3]), size_bytes=st.integers(0, 30), ttl_s=st.none() | st.floats(0, 5)
    )
    def offer(self, priority: int, size_bytes: int, ttl_s: float | None) -> None:
        self.number += 1
        expires_s = None if ttl_s is None else self.now_s + ttl_s
        ticket = Ticket(str(self.number), self.now_s, priority, "f", size_bytes, expires_s)
        of_band = [t for t in self.naive if t.priority == priority]
        full = len(self.naive) >= 10 or len(of_band) >= 6
        full = full or sum(t.size_bytes for t in of_band) + size_bytes > 60
        assert (self.queue.offer(ticket) is not None) == full
        if not full:
            self.naive.append(ticket)

    @rule()
    def take(self) -> None:
        expected = min(self.naive, key=lambda t: (-t.priority, t.arrived_s, int(t.id)), default=None)
        assert self.queue.take(self.now_s) == expected
        if expected is not None:
            self.naive.remove(expected)

    @rule(place=st.integers(0, 12))
    def cancel(self, place: int) -> None:
        if place < len(self.naive):
            assert self.queue.cancel(self.naive.pop(place).id)
        assert not self.queue.cancel("nobody")

    @rule(seconds=st.floats(0, 3))
    def later(self, seconds: float) -> None:
        self.now_s += seconds
        late = {t.id for t in self.naive if (math.inf if t.expires_s is None else t.expires_s) <= self.now_s}
        assert {t.id for t in self.queue.expire(self.now_s)} == late
        self.naive = [t for t in self.naive if t.id not in late]

    @invariant()
    def counts_are_true(self) -> None:
        assert len(self.queue) == len(self.naive)
        assert self.queue.bytes == sum(t.size_bytes for t in self.naive)
        assert self.queue.fill.keys() == {t.priority for t in self.naive}
        for priority, fill in self.queue.fill.items():
            own = [t for t in self.naive if t.priority == priority]
            assert (fill.requests, fill.bytes) == (len(own), sum(t.size_bytes for t in own))


TestAgainstNaive = AgainstNaive.TestCase
