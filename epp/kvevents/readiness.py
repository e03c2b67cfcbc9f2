"""Which of many ZMQ sockets may have a message, at a cost that follows those and not all of them.

`zmq.Poller` asks every socket on every call: with 256 engines (512 sockets) that costs more than reading
what they say, and asking one socket costs as much as a read. Here the kernel's epoll watches the sockets'
own descriptors, and no socket is asked. Such a descriptor only says that *something* happened, and says it
once: an owner stays named until it has read its socket empty and says so (`emptied`).

For one thread. It must not read messages.
"""

from __future__ import annotations

import select
from collections.abc import Hashable

import zmq

Socket = zmq.Socket[bytes]


class Readiness:
    """Sockets with an owner each, which stands for one socket only."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Hashable] = {}
        self._pending: dict[
            Hashable, None
        ] = {}  # owners whose sockets may have messages, longest waiting first

    def add(self, socket: Socket, owner: Hashable) -> None:
        """Watch `socket`. It counts as ready at first, because it may have messages already."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._watched[descriptor] = owner
        self._pending[owner] = None
        self._epoll.register(descriptor, select.EPOLLIN)

    def emptied(self, owner: Hashable) -> None:
        """The owner has read until there was nothing left."""
        self._pending.pop(owner, None)

    def look_again(self, owner: Hashable) -> None:
        """The owner may have left messages; the others are named before it."""
        self._pending.pop(owner, None)
        self._pending[owner] = None

    def remove(self, socket: Socket) -> None:
        """Stop watching; call it before the socket is closed. Harmless for a socket never added."""
        descriptor = int(socket.getsockopt(zmq.FD))
        owner = self._watched.pop(descriptor, None)
        if owner is not None:
            self._pending.pop(owner, None)
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float) -> list[Hashable]:
        """Owners whose sockets may have a message; waits at most `timeout_s` if there are none yet. All that
        happened before the call is among them."""
        for descriptor, _ in self._epoll.poll(0.0 if self._pending else timeout_s, len(self._watched) or 1):
            self._pending.setdefault(self._watched[descriptor])
        return list(self._pending)

    def close(self) -> None:
        """Close epoll; the sockets stay the owner's."""
        self._epoll.close()
