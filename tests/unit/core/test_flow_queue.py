"""The queues: bands by priority, bounds, expiry; nothing that has left is counted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.core.flow_queue import BandSettings, FlowLimits, FlowQueue, QueueFull, Waiting
from epp.plugins.flow_policies import GlobalStrictFairness, Ordering, RoundRobinFairness

FCFS = Ordering("fcfs", lambda w: (w.arrived_s, w.number))
STRICT = BandSettings(GlobalStrictFairness("strict"), FCFS)


def queue(limits: FlowLimits | None = None, **bands: BandSettings) -> FlowQueue:
    return FlowQueue({}, bands.get("default", STRICT), bands.get("negative"), limits)


def waits(
    number: int, priority: int = 0, flow: str = "f", size: int = 10, expires_at_s: float = 60.0
) -> Waiting:
    return Waiting(number, flow, priority, size, float(number), expires_at_s)


def drain(flow_queue: FlowQueue) -> list[int]:
    taken = []
    while (waiting := flow_queue.take_next(0.0)) is not None:
        taken.append(waiting.number)
    return taken


def test_the_highest_priority_is_first_and_below_it_who_came_first() -> None:
    flow_queue = queue()
    for number, priority in enumerate((0, -1, 5, 0, 5)):
        flow_queue.add(waits(number, priority))
    assert flow_queue.depths() == {0: (2, 20), -1: (1, 10), 5: (2, 20)}
    assert drain(flow_queue) == [2, 4, 0, 3, 1]
    assert (len(flow_queue), flow_queue.size_bytes, flow_queue.depths()) == (0, 0, {})


def test_flows_take_turns_where_the_band_says_so() -> None:
    flow_queue = queue(default=BandSettings(RoundRobinFairness("rr"), FCFS))
    for number, flow in enumerate("aaab"):
        flow_queue.add(waits(number, flow=flow))
    assert drain(flow_queue) == [0, 3, 1, 2]


def test_bands_have_settings_of_their_own() -> None:
    small = BandSettings(GlobalStrictFairness("s"), FCFS, max_requests=1)
    flow_queue = FlowQueue({7: small}, STRICT, small)
    flow_queue.add(waits(1, 7))
    flow_queue.add(waits(2, -3))
    flow_queue.add(waits(3, 0))
    flow_queue.add(waits(4, 0))
    for priority in (7, -3):
        with pytest.raises(QueueFull, match=f"priority {priority} has 1 requests waiting"):
            flow_queue.add(waits(9, priority))
    assert len(flow_queue) == 4


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (FlowLimits(max_requests=2), "2 requests are waiting"),
        (FlowLimits(max_bytes=25), "20 bytes are waiting"),
    ],
)
def test_all_bands_together_are_bounded(limits: FlowLimits, said: str) -> None:
    flow_queue = queue(limits)
    flow_queue.add(waits(1, 0))
    flow_queue.add(waits(2, 1))
    with pytest.raises(QueueFull, match=said):
        flow_queue.add(waits(3, 2))
    assert flow_queue.depths() == {0: (1, 10), 1: (1, 10)}
    assert flow_queue.withdraw(1)
    flow_queue.add(waits(3, 2))


def test_bytes_of_a_band_are_bounded() -> None:
    flow_queue = queue(default=BandSettings(GlobalStrictFairness("s"), FCFS, max_bytes=25))
    flow_queue.add(waits(1))
    flow_queue.add(waits(2))
    with pytest.raises(QueueFull, match="priority 0 has 20 bytes waiting"):
        flow_queue.add(waits(3))


def test_the_overdue_leave_once() -> None:
    flow_queue = queue()
    for number, expires_at_s in ((1, 5.0), (2, 9.0), (3, float("inf"))):
        flow_queue.add(waits(number, expires_at_s=expires_at_s))
    assert [w.number for w in flow_queue.expire(4.9)] == []
    assert [w.number for w in flow_queue.expire(5.0)] == [1]
    assert flow_queue.withdraw(2)
    assert not flow_queue.withdraw(2)
    assert flow_queue.expire(1e9) == []
    assert drain(flow_queue) == [3]


class Queues(RuleBasedStateMachine):
    """Whatever is done, the counts are those of what is there."""

    def __init__(self) -> None:
        super().__init__()
        band = BandSettings(RoundRobinFairness("rr"), FCFS, max_bytes=300, max_requests=6)
        self.queue = FlowQueue({}, band, STRICT, FlowLimits(max_bytes=500, max_requests=10))
        self.number = 0
        self.inside: set[int] = set()

    @rule(
        priority=st.integers(-1, 1),
        flow=st.sampled_from("ab"),
        size=st.integers(0, 200),
        ttl=st.integers(1, 9),
    )
    def add(self, priority: int, flow: str, size: int, ttl: int) -> None:
        self.number += 1
        try:
            self.queue.add(waits(self.number, priority, flow, size, float(ttl)))
        except QueueFull:
            return
        self.inside.add(self.number)

    @rule()
    def take(self) -> None:
        taken = self.queue.take_next(0.0)
        assert (taken is None) == (not self.inside)
        if taken is not None:
            self.inside.remove(taken.number)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.inside)))
        assert self.queue.withdraw(number)
        self.inside.remove(number)

    @rule(now_s=st.integers(0, 9))
    def expire(self, now_s: int) -> None:
        self.inside -= {w.number for w in self.queue.expire(float(now_s))}

    @invariant()
    def counts(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.inside)


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=30, stateful_step_count=40)
