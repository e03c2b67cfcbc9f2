"""The mover process: `python -m engine_plugin.transport.mover`, one beside each engine rank.

It maps the engine's tier, owns the NIXL agent on its only thread, and knows nothing else: no key, no
prompt, no peer address. So it may be killed, or be aborted by a peer's death, at any time; the engine
starts another under the next epoch. It ends when the link closes (after draining what it has posted)
or with its parent (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Final

import numpy as np

from engine_plugin import protocol
from engine_plugin.transport.mover import messages
from engine_plugin.transport.mover.agent import WARM_UP, Agent
from engine_plugin.transport.mover.moves import Moves
from engine_plugin.transport.mover.staging import INBOX_BYTES, PACKED_BELOW_BYTES, Staging

ACTIVE_POLL_MS: Final = 0.1  # between polls while a transfer is under way
IDLE_POLL_MS: Final = 500.0  # only to notice peers that left
LINGER_S: Final = 0.1  # active polling after the last activity: notifications leave, peers connect
COOLING_POLL_MS: Final = 2.0  # then, for a while: a socket that was full still holds a notification
COOLING_S: Final = 2.0
DRAIN_S: Final = 1.0
MAX_EARLY: Final = 1_024
EAGER_ROUNDS: Final = 50  # polls without a pause after something moved
_PR_SET_PDEATHSIG: Final = 1


class Link:
    """The mover's end of the socket pair: frames in, reports out. Blocking writes, bounded reads."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = bytearray()
        self.closed = False

    def wait(self, timeout_ms: float) -> bool:
        """Whether the engine has something to say, after at most `timeout_ms`."""
        if timeout_ms <= 0 or timeout_ms >= 1:
            return bool(self._poll.poll(timeout_ms))
        ready, _, _ = select.select([self._socket], [], [], timeout_ms / 1000)
        return bool(ready)

    def read(self) -> list[messages.AnyOrder]:
        """Every whole order that has arrived; sets `closed` at end of stream."""
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self.closed = not data
        self._buffer += data
        orders: list[messages.AnyOrder] = []
        while len(self._buffer) >= protocol.HEADER_BYTES:
            header = bytes(self._buffer[: protocol.HEADER_BYTES])
            end = protocol.HEADER_BYTES + protocol.payload_bytes(header, messages.LINK_FRAME_BYTES)
            if len(self._buffer) < end:
                break
            orders.append(messages.decode_order(bytes(self._buffer[protocol.HEADER_BYTES : end])))
            del self._buffer[:end]
        return orders

    def send(self, report: messages.Report) -> None:
        """One report; a link whose other end is gone is closed, not an error."""
        try:
            self._socket.sendall(protocol.encode(report))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True


class Mover:
    """The loop: orders from the link, progress of moves, arrivals from peers."""

    def __init__(self, link: Link, agent: Agent, moves: Moves, staging: Staging | None = None) -> None:
        self._link = link
        self._agent = agent
        self._moves = moves
        self._staging = staging
        self._expected: set[str] = set()
        self._early: dict[str, None] = {}  # notified before the engine's `Expect` reached us; oldest first
        self._linger_until_s = 0.0

    def run(self) -> None:
        """Until the link closes; then drain for at most `DRAIN_S`."""
        eager = 0
        while not self._link.closed:
            now_s = time.monotonic()
            if self._moves.active or self._expected:
                self._linger_until_s = now_s + LINGER_S
            if self._link.wait(self._pause_ms(now_s, eager)):
                for order in self._link.read():
                    self._obey(order)
            moved = self._moves.step() | self._collect()
            eager = EAGER_ROUNDS if moved else max(0, eager - 1)
        self._drain()

    def _pause_ms(self, now_s: float, eager: int) -> float:
        if now_s < self._linger_until_s:
            return 0.0 if eager else ACTIVE_POLL_MS
        return COOLING_POLL_MS if now_s < self._linger_until_s + COOLING_S else IDLE_POLL_MS

    def _drain(self) -> None:
        self._moves.cancel_all()
        until = time.monotonic() + DRAIN_S
        while self._moves.active and time.monotonic() < until:
            self._moves.step()
            time.sleep(ACTIVE_POLL_MS / 1000)

    def _collect(self) -> bool:
        tags = self._agent.arrivals()
        for tag in tags:
            if tag in self._expected:
                self._expected.discard(tag)
                self._link.send(messages.Arrived(tag))
            elif tag != WARM_UP:
                self._keep_early(tag)
        return bool(tags)

    def _keep_early(self, tag: str) -> None:
        """A small move can be over before its `Expect` has come through the link."""
        self._early[tag] = None
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def _expect(self, tag: str) -> None:
        if tag in self._early:
            del self._early[tag]
            self._link.send(messages.Arrived(tag))
        else:
            self._expected.add(tag)

    def _scatter(self, tag: str, offset: int, slots: list[int]) -> None:
        if self._staging is not None:
            self._staging.scatter(offset, slots)
            self._link.send(messages.Scattered(tag))

    def _obey(self, order: messages.AnyOrder) -> None:
        """`Wake` is obeyed by lingering."""
        if not isinstance(order, messages.Alive):
            self._linger_until_s = time.monotonic() + LINGER_S
        match order:
            case messages.Alive():
                self._link.send(messages.Living())
            case messages.StartMove():
                self._moves.start(order)
            case messages.Expect(tag=tag):
                self._expect(tag)
            case messages.Unexpect(tag=tag):
                self._expected.discard(tag)
                self._early.pop(tag, None)
            case messages.Scatter(tag=tag, offset=offset, slots=slots):
                self._scatter(tag, offset, slots)
            case messages.CancelMove(tag=tag):
                self._moves.cancel(tag)
            case messages.Proceed(tag=tag):
                self._moves.proceed(tag)
            case messages.AddPeer(agent=agent, metadata=metadata):
                self._agent.add_peer(agent, metadata)
            case messages.DropPeer(agent=agent):
                self._moves.drop_peer(agent)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL when the parent ends, however it ends; at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the engine ended before its mover started")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mover", description=__doc__)
    for name in ("--link-fd", "--tier-fd", "--slots", "--slot-bytes", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--agent", required=True)
    return parser.parse_args()


def main() -> None:
    """Map, register, report ready, run."""
    args = _arguments()
    die_with_parent(args.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then closes the link
    link = Link(args.link_fd)
    total_bytes = args.slots * args.slot_bytes
    tier = mmap.mmap(args.tier_fd, total_bytes)
    array: Any = np.frombuffer(tier, dtype=np.uint8)
    base_address = int(array.ctypes.data)
    staging = None
    if args.slot_bytes < PACKED_BELOW_BYTES:
        staging = Staging(array.reshape(args.slots, args.slot_bytes))
    area = None if staging is None else (staging.address, staging.total_bytes)
    agent = Agent(args.agent, base_address, total_bytes, area)
    inbox = (0, 0) if staging is None else (staging.address, INBOX_BYTES)
    link.send(messages.Ready(agent.name, agent.metadata, base_address, *inbox))
    moves = Moves(agent, args.slots, args.slot_bytes, link.send, staging)
    Mover(link, agent, moves, staging).run()
    sys.stderr.flush()
    os._exit(0)  # destroying an agent can abort or hang; the process is the unit of clean-up


if __name__ == "__main__":
    main()
