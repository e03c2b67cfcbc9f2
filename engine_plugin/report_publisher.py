"""The socket on which an engine publishes its `PullFinished` reports.

Belongs to one thread. Never blocks and never fails an engine: with no subscriber, or one that is too slow,
a report is dropped, and the picker then knows of that pull that it knows nothing.
"""

from __future__ import annotations

import contextlib

import zmq

from engine_plugin.identity import format_address
from engine_plugin.pull_report import PullFinished, encode

_QUEUED_REPORTS = 1000  # a subscriber


class ReportPublisher:
    """Bind, publish, close."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def bind(self, host: str, port: int = 0) -> int:
        """The real port. Raises OSError (address in use)."""
        socket = self._socket = self._context.socket(zmq.PUB)
        socket.ipv6 = ":" in host
        socket.set_hwm(_QUEUED_REPORTS)
        socket.linger = 0
        try:
            socket.bind(f"tcp://{format_address((host, port)) if port else _any_port(host)}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def publish(self, report: PullFinished) -> None:
        """Hand a report to whoever listens; before `bind` and after `close` to nobody."""
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(encode(report), zmq.NOBLOCK)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._context.term()


def _any_port(host: str) -> str:
    return f"[{host}]:*" if ":" in host else f"{host}:*"
