"""The thread that receives the KV events of all engines and does nothing else.

A SUB socket per endpoint, a DEALER socket per running replay. The thread does not decode: it hands
frames to the event loop in the order in which it received them, and says when a subscription came up
or went down and when a replay ended. The sender is known by the socket, never by what a message says.
So a SUB socket lives for one connection: what it still holds when that ends may be a dead process's
and is thrown away with it (a replay follows), and its successor is opened after a moment.

All sockets here belong to the thread. Every wait is bounded, and so are the bytes: a full hand-over
stops the reading of subscriptions, whose own queues hold a few messages; a replay is read on, because
its queue has room for a whole buffer of messages of any size, and is cut when too much waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from epp.kvevents.framing import is_end_of_replay, replay_request
from epp.kvevents.hand_over import HandOver
from epp.kvevents.link import (
    Add,
    Cancel,
    Command,
    LinkChanged,
    LiveFrames,
    Received,
    ReceiverFailed,
    Remove,
    Replay,
    ReplayEnded,
    ReplayFrames,
    SocketSettings,
)
from epp.kvevents.readiness import Readiness

log = logging.getLogger(__name__)

WAKE_ADDRESS = "inproc://kvevents-wake"
_MONITOR_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# From all sockets. The thread holds the interpreter lock while it reads them: without an end to that the loop
# waits for it as long as an interpreter may be waited for, 5 ms, in every turn of a storm of replays.
_MESSAGES_A_TURN = 64
_IDLE_POLL_S = 1.0
_COALESCE_S = 0.004  # after a turn that read all there was: the next one finds more, and costs no more
_YIELD_S = 0.001  # after one that did not
_FULL_POLL_S = 0.05  # while the loop is behind, if its wake-up should be lost
_MESSAGE_BYTES = 512  # what a message takes besides its bytes, about


@dataclass(slots=True, eq=False)
class _Link:
    add: Add
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Monitor:
    link: _Link


@dataclass(slots=True, eq=False)
class _RunningReplay:
    replay: int
    socket: zmq.Socket[bytes]
    deadline_s: float
    idle_at_s: float


class Receiver:
    """The thread's state; `run` is its body."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        commands: deque[Command],
        stopping: threading.Event,
        hand_over: HandOver[Received],
        settings: SocketSettings,
    ) -> None:
        self._context = context
        self._commands = commands
        self._stopping = stopping
        self._hand_over = hand_over
        self._settings = settings
        self._links: dict[int, _Link] = {}
        self._lost: dict[int, tuple[Add, float]] = {}  # subscriptions to open again, and when
        self._replays: dict[int, _RunningReplay] = {}
        self._ready = Readiness()

    def run(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        try:
            wake.connect(WAKE_ADDRESS)
            self._ready.add(wake, wake)
            while not self._stopping.is_set():
                self._turn(wake)
        except Exception as error:  # task guard of the thread: without it the component dies in silence
            log.exception("the KV event thread failed")
            self._hand_over.put(ReceiverFailed(type(error).__name__), 0)
            self._hand_over.announce()
        finally:
            for replay in list(self._replays):
                self._close_replay(replay)
            for link in list(self._links):
                self._close_link(link)
            self._ready.close()
            wake.close(0)

    def _turn(self, wake: zmq.Socket[bytes]) -> None:
        """One wait, and what came of it."""
        _drain(wake)  # before the look at the commands: a wake-up after that ends the wait
        self._ready.emptied(wake)
        room = _MESSAGES_A_TURN
        if self._hand_over.is_full():
            wake.poll(int(self._wait_s(True, time.monotonic()) * 1000) + 1)
            left = self._read_replays(room)
        else:
            left = self._read_ready(room)
        self._end_late_replays()
        self._reopen_lost()
        while self._commands:
            self._execute(self._commands.popleft())
        self._hand_over.announce()
        if left < room:
            time.sleep(_COALESCE_S if left > 0 else _YIELD_S)

    def _read_ready(self, room: int) -> int:
        """Read up to `room` messages and changes of connections; the room that is left."""
        ready = self._ready.wait(self._wait_s(False, time.monotonic()))
        for owner in ready:
            # first: the state of a connection comes ahead of what it brings
            if isinstance(owner, _Monitor):
                room = self._read_monitor(owner, room)
        for owner in ready:
            if room <= 0:
                break
            if isinstance(owner, _Link) and not owner.socket.closed:
                room = self._read_link(owner, room)
            elif isinstance(owner, _RunningReplay) and not owner.socket.closed:
                room = self._read_replay(owner, room)
        return room

    def _wait_s(self, full: bool, now_s: float) -> float:
        if self._commands:
            return 0.0
        if full:
            return _COALESCE_S if self._replays else _FULL_POLL_S
        ends = [min(r.deadline_s, r.idle_at_s) - now_s for r in self._replays.values()]
        ends += [at_s - now_s for _, at_s in self._lost.values()]
        return max(0.0, min([_IDLE_POLL_S, *ends]))

    # --- subscriptions --------------------------------------------------------------------------

    def _read_monitor(self, monitor: _Monitor, room: int) -> int:
        link = monitor.link
        while True:
            try:
                event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                self._ready.emptied(monitor)
                return room
            up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if up == link.up:
                continue
            link.up = up
            room -= 1
            self._hand_over.put(LinkChanged(link.add.endpoint, link.add.link, up), 0)
            if not up:
                self._close_link(link.add.link)
                self._lost[link.add.link] = link.add, time.monotonic() + self._settings.reconnect_s
                return room

    def _reopen_lost(self) -> None:
        now_s = time.monotonic()
        for add, at_s in list(self._lost.values()):
            if now_s < at_s:
                continue
            try:
                self._links[add.link] = self._subscribe(add)
                del self._lost[add.link]
            except zmq.ZMQError as error:  # no file descriptor left, for one: later, not never
                log.warning("no new subscription to the KV events of %s yet: %s", add.endpoint, error)
                self._lost[add.link] = add, now_s + self._settings.reconnect_max_s

    def _read_link(self, link: _Link, room: int) -> int:
        while room > 0:
            frames = _receive(link.socket)
            if frames is None:
                self._ready.emptied(link)
                return room
            self._hand_over.put(LiveFrames(link.add.endpoint, link.add.link, frames), _size_bytes(frames))
            room -= 1
            if self._hand_over.is_full() or self._stopping.is_set():
                room = 0
        self._ready.look_again(link)
        return room

    # --- replays --------------------------------------------------------------------------------

    def _read_replays(self, room: int) -> int:
        """Unasked: while the hand-over is full, subscriptions would be ready all the time."""
        share = max(1, room // max(1, len(self._replays)))
        for running in list(self._replays.values()):
            room -= share - self._read_replay(running, share)
        return room

    def _read_replay(self, running: _RunningReplay, room: int) -> int:
        while room > 0:
            frames = _receive(running.socket)
            if frames is None:
                self._ready.emptied(running)
                return room
            room -= 1
            running.idle_at_s = time.monotonic() + self._settings.replay_idle_s
            if is_end_of_replay(frames):
                self._finish(running, True, "end")
                return room
            self._hand_over.put(ReplayFrames(running.replay, frames), _size_bytes(frames))
            if self._hand_over.is_over():
                self._finish(running, False, "cut")
                return room
        self._ready.look_again(running)
        return room

    def _end_late_replays(self) -> None:
        now_s = time.monotonic()
        for running in list(self._replays.values()):
            if now_s >= running.deadline_s:
                self._finish(running, False, "deadline")
            elif now_s >= running.idle_at_s:
                self._finish(running, False, "idle")

    def _finish(self, running: _RunningReplay, ok: bool, reason: str) -> None:
        self._close_replay(running.replay)
        self._hand_over.put(ReplayEnded(running.replay, ok, reason), 0)

    # --- commands -------------------------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        if isinstance(command, Remove):
            self._lost.pop(command.link, None)
            self._close_link(command.link)
        elif isinstance(command, Cancel):
            self._close_replay(command.replay)
        elif isinstance(command, Add):
            try:
                self._links[command.link] = self._subscribe(command)
            except zmq.ZMQError as error:  # one bad address must not end the thread
                log.error("no subscription to the KV events of %s: %s", command.endpoint, error)
        else:
            try:
                self._replays[command.replay] = self._ask_replay(command)
            except zmq.ZMQError as error:
                log.warning("no replay from %s: %s", command.address, error)
                self._hand_over.put(ReplayEnded(command.replay, False, "unreachable"), 0)

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        settings = self._settings
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = hwm
        socket.ipv6 = True
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, int(settings.reconnect_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(settings.reconnect_max_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_timeout_s * 1000))
        return socket

    def _subscribe(self, command: Add) -> _Link:
        socket = self._socket(zmq.SUB, self._settings.live_hwm)
        monitor = socket.get_monitor_socket(_MONITOR_EVENTS)
        link = _Link(command, socket, monitor)
        try:
            monitor.linger = 0
            socket.subscribe(b"")
            socket.connect(command.source.address(command.source.events_port))
        except zmq.ZMQError:
            _close(link)
            raise
        self._ready.add(socket, link)
        self._ready.add(monitor, _Monitor(link))
        return link

    def _ask_replay(self, command: Replay) -> _RunningReplay:
        socket = self._socket(zmq.DEALER, self._settings.replay_hwm)
        try:
            socket.connect(command.address)
            socket.send_multipart(replay_request(command.from_seq), zmq.NOBLOCK)
        except zmq.ZMQError:
            socket.close(0)
            raise
        now_s = time.monotonic()
        running = _RunningReplay(
            command.replay,
            socket,
            deadline_s=now_s + self._settings.replay_deadline_s,
            idle_at_s=now_s + self._settings.replay_idle_s,
        )
        self._ready.add(socket, running)
        return running

    def _close_link(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            self._ready.remove(link.socket)
            self._ready.remove(link.monitor)
            _close(link)

    def _close_replay(self, number: int) -> None:
        running = self._replays.pop(number, None)
        if running is not None:
            self._ready.remove(running.socket)
            running.socket.close(0)


def _close(link: _Link) -> None:
    link.socket.disable_monitor()
    link.monitor.close(0)
    link.socket.close(0)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _size_bytes(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _MESSAGE_BYTES


def _drain(wake: zmq.Socket[bytes]) -> None:
    while _receive(wake) is not None:
        pass
