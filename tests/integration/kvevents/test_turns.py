"""What the receiving thread does in one turn, with real sockets: bounded, fair, and with one wake-up."""

from __future__ import annotations

import asyncio
import select
import threading
from collections import Counter, deque
from collections.abc import Iterator

import pytest
import zmq

from engine_plugin.identity import EndpointId
from epp.kvevents.hand_over import HandOver, HandOverLimits
from epp.kvevents.link import Add, Command, EventSource, LinkChanged, LiveFrames, Received, SocketSettings
from epp.kvevents.receiver import WAKE_ADDRESS, Receiver

HOST, WAIT_S = "127.0.0.1", 30.0


class Turns:
    """A receiver whose turns a test makes itself, publishers, and a loop that notes when it is woken."""

    def __init__(self, publishers: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.commands: deque[Command] = deque()
        self.wakes = 0
        self.hand_over: HandOver[Received] = HandOver(_Loop(self), HandOverLimits(), lambda: None)
        settings = SocketSettings(live_hwm=1_000)
        self.receiver = Receiver(self.context, self.commands, threading.Event(), self.hand_over, settings)
        self.far = self.context.socket(zmq.PAIR)
        self.far.bind(WAKE_ADDRESS)
        self.wake = self.context.socket(zmq.PAIR)
        self.wake.connect(WAKE_ADDRESS)
        self.receiver._ready.add(self.wake, self.wake)
        self.publishers = [self._publisher(number) for number in range(publishers)]

    def _publisher(self, number: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.XPUB)
        socket.linger, socket.sndhwm = 0, 10_000
        port = socket.bind_to_random_port(f"tcp://{HOST}")
        self.commands.append(Add(EndpointId(f"e{number}"), number, EventSource(HOST, port, None)))
        return socket

    def turn(self) -> list[Received]:
        """One turn, and what it handed over."""
        self.far.send(b"")  # so that it does not wait
        self.receiver._turn(self.wake)
        items = []
        while (item := self.hand_over.take()) is not None:
            items.append(item)
        return items

    def connect(self) -> None:
        self.turn()
        for socket in self.publishers:
            assert socket.poll(int(WAIT_S * 1000)), "nobody subscribed"
            socket.recv()
        up = 0
        while up < len(self.publishers):
            up += sum(isinstance(item, LinkChanged) and item.up for item in self.turn())

    def publish(self, number: int, count: int) -> None:
        for seq in range(count):
            self.publishers[number].send_multipart([b"kv", seq.to_bytes(8, "big"), b"payload"])

    def wait_for_data(self, number: int) -> None:
        """Until something has come; asking the socket itself would use up its only notice."""
        descriptor = int(self.receiver._links[number].socket.getsockopt(zmq.FD))
        assert select.select([descriptor], [], [], WAIT_S)[0], "nothing came"

    def close(self) -> None:
        self.context.destroy(linger=0)


class _Loop(asyncio.AbstractEventLoop):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self._turns.wakes += 1
        callback(*args)


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns(3)
    made.connect()
    yield made
    made.close()


def _live(items: list[Received]) -> list[LiveFrames]:
    return [item for item in items if isinstance(item, LiveFrames)]


def test_a_turn_reads_a_bounded_number_of_messages_and_wakes_the_loop_once(turns: Turns) -> None:
    for number in range(3):
        turns.publish(number, 200)
    read: list[LiveFrames] = []
    while len(read) < 600:
        turns.wakes = 0
        some = turns.turn()
        assert len(some) <= 64
        assert turns.wakes == (1 if some else 0)
        read += _live(some)
    sequences: dict[EndpointId, list[int]] = {}
    for item in read:
        sequences.setdefault(item.endpoint, []).append(int.from_bytes(item.frames[1], "big"))
    assert sequences == {EndpointId(f"e{n}"): list(range(200)) for n in range(3)}


def test_an_endpoint_that_never_stops_does_not_keep_the_others_from_being_read(turns: Turns) -> None:
    for number, count in ((0, 500), (1, 10), (2, 10)):
        turns.publish(number, count)
        turns.wait_for_data(number)
    counts: Counter[EndpointId] = Counter()
    for _ in range(3):
        counts.update(item.endpoint for item in _live(turns.turn()))
    assert counts.keys() == {EndpointId("e0"), EndpointId("e1"), EndpointId("e2")}
    assert counts[EndpointId("e0")] < 500


def test_nothing_is_left_to_look_at_after_the_last_message(turns: Turns) -> None:
    turns.publish(1, 3)
    read = 0
    while read < 3:
        read += len(_live(turns.turn()))
    turns.turn()
    assert turns.receiver._ready.wait(0.0) == []


def test_a_lost_connection_is_told_after_what_it_brought(turns: Turns) -> None:
    turns.publish(1, 5)
    read: list[Received] = []
    while len(_live(read)) < 5:
        read += turns.turn()
    turns.publishers[1].close(0)
    while not isinstance(read[-1], LinkChanged):
        read += turns.turn()
    assert [type(item) for item in read] == [LiveFrames] * 5 + [LinkChanged]
    assert read[-1] == LinkChanged(EndpointId("e1"), 1, up=False)
