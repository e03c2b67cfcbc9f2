"""`Readiness` against real ZMQ sockets in this process: nothing is missed, nothing idle is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.kvevents.readiness import Readiness

WAIT_S = 10.0


class Pairs:
    """PAIR sockets of which one end is watched under its number."""

    def __init__(self, count: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.readiness = Readiness()
        self.near: list[zmq.Socket[bytes]] = []
        self.far: list[zmq.Socket[bytes]] = []
        for number in range(count):
            near, far = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
            near.bind(f"inproc://pair-{number}")
            far.connect(f"inproc://pair-{number}")
            self.readiness.add(near, number)
            self.near.append(near)
            self.far.append(far)

    def read(self, number: int, most: int = 1_000) -> list[bytes]:
        """As a receiver does: until nothing is left, or enough was read."""
        texts: list[bytes] = []
        while len(texts) < most:
            try:
                texts.append(self.near[number].recv(zmq.NOBLOCK))
            except zmq.Again:
                self.readiness.emptied(number)
                return texts
        self.readiness.look_again(number)
        return texts

    def settle(self) -> None:
        for number in self.readiness.wait(0.0):
            assert isinstance(number, int)
            assert self.read(number) == []

    def close(self) -> None:
        self.readiness.close()
        self.context.destroy(linger=0)


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs(3)
    made.settle()
    yield made
    made.close()


def test_only_the_socket_with_a_message_is_ready(pairs: Pairs) -> None:
    pairs.far[1].send(b"x")
    assert pairs.readiness.wait(WAIT_S) == [1]


def test_a_socket_that_was_not_emptied_stays_ready(pairs: Pairs) -> None:
    for text in (b"a", b"b", b"c"):
        pairs.far[2].send(text)
    seen = []
    for _ in range(3):
        assert pairs.readiness.wait(WAIT_S) == [2]
        seen += pairs.read(2, most=1)
    assert seen == [b"a", b"b", b"c"]
    assert pairs.readiness.wait(0.0) == [2]  # nobody has seen yet that it is empty
    assert pairs.read(2) == []
    assert pairs.readiness.wait(0.0) == []


def test_who_left_messages_comes_after_those_who_were_not_read(pairs: Pairs) -> None:
    for number in (0, 1):
        for text in (b"a", b"b"):
            pairs.far[number].send(text)
    first, second = pairs.readiness.wait(WAIT_S)
    assert isinstance(first, int)
    pairs.read(first, most=1)
    assert pairs.readiness.wait(0.0) == [second, first]


def test_a_message_from_before_the_add_is_seen() -> None:
    made = Pairs(0)
    near, far = made.context.socket(zmq.PAIR), made.context.socket(zmq.PAIR)
    near.bind("inproc://late")
    far.connect("inproc://late")
    far.send(b"x")
    assert int(near.getsockopt(zmq.EVENTS)) & zmq.POLLIN  # its descriptor has nothing more to say
    made.readiness.add(near, "late")
    assert made.readiness.wait(0.0) == ["late"]
    made.close()


def test_a_removed_socket_is_never_named(pairs: Pairs) -> None:
    pairs.far[0].send(b"x")
    pairs.far[1].send(b"x")
    pairs.readiness.remove(pairs.near[0])
    assert pairs.readiness.wait(WAIT_S) == [1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 3)), max_size=40))
def test_whatever_the_order_every_message_is_reached(steps: list[tuple[bool, int, int]]) -> None:
    made = Pairs(3)
    sent = [0, 0, 0]
    read = [0, 0, 0]

    def read_some(limit: int) -> None:
        for number in made.readiness.wait(0.0):
            assert isinstance(number, int)
            read[number] += len(made.read(number, limit))

    for sending, number, amount in steps:
        if sending:
            for _ in range(amount):
                made.far[number].send(b"m")
            sent[number] += amount
        else:
            read_some(amount)
    while read != sent:
        assert made.readiness.wait(WAIT_S), "messages are left and nobody is ready"
        read_some(2)
    made.settle()
    assert made.readiness.wait(0.0) == []
    made.close()
