"""Which of many ZMQ sockets can be read, at a cost that follows the ready ones and not all of them.

`zmq.Poller` asks every socket on every call: with 256 engines (512 sockets) that costs more than reading
what they say. Here the kernel's epoll watches the sockets' own descriptors. Such a descriptor only says
that *something* happened; whether there is a message is asked of the socket, and a socket that was left
with messages is remembered, because its descriptor will not say it again.

For one thread. It must not read messages.
"""

from __future__ import annotations

import select
from collections.abc import Iterator

import zmq

Socket = zmq.Socket[bytes]


class Readiness:
    """Sockets with a value of the owner's each."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Socket, object]] = {}
        self._pending: dict[int, None] = {}  # descriptors whose sockets may still have messages

    def add(self, socket: Socket, owner: object) -> None:
        """Watch `socket`. It counts as ready once, because it may have messages already."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._watched[descriptor] = socket, owner
        self._pending[descriptor] = None
        self._epoll.register(descriptor, select.EPOLLIN)

    def look_again(self, socket: Socket) -> None:
        """The owner has read from `socket` unasked and may have left messages."""
        self._pending[int(socket.getsockopt(zmq.FD))] = None

    def remove(self, socket: Socket) -> None:
        """Stop watching; call it before the socket is closed. Harmless for a socket never added."""
        descriptor = int(socket.getsockopt(zmq.FD))
        if self._watched.pop(descriptor, None) is not None:
            self._pending.pop(descriptor, None)
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float) -> list[object]:
        """Owners of sockets with a message; waits at most `timeout_s` for the first one."""
        if any(self._is_readable(descriptor) for descriptor in self._pending):
            timeout_s = 0.0
        for descriptor, _ in self._epoll.poll(timeout_s):
            self._pending[descriptor] = None
        ready = dict(self._settle())
        return list(ready)

    def _settle(self) -> Iterator[tuple[object, None]]:
        """The pending sockets that have a message; the others are forgotten until epoll names them."""
        for descriptor in list(self._pending):
            if self._is_readable(descriptor):
                yield self._watched[descriptor][1], None
            else:
                del self._pending[descriptor]

    def _is_readable(self, descriptor: int) -> bool:
        events = self._watched[descriptor][0].getsockopt(zmq.EVENTS)
        return bool(int(events) & zmq.POLLIN)

    def close(self) -> None:
        """Close epoll; the sockets stay the owner's."""
        self._epoll.close()
