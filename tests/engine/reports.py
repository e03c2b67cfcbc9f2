"""An engine's `PullFinished` reports, waited for by id."""

from __future__ import annotations

import time
from typing import Final

import zmq

from engine_plugin.pull_report import PullFinished, decode

WAIT_S: Final = 60.0


class Reports:
    """A subscriber; what comes is kept by id."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        assert self._monitor.poll(WAIT_S * 1e3), "the engine's reports port does not answer"
        self._known: dict[str, PullFinished] = {}

    def of(self, kv_request_id: str) -> PullFinished:
        """Raises `TimeoutError` if no report of that id comes."""
        deadline_s = time.monotonic() + WAIT_S
        while kv_request_id not in self._known:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._socket.poll(left_s * 1e3):
                raise TimeoutError(f"no report of {kv_request_id}; known: {list(self._known)}")
            report = decode(self._socket.recv_multipart())
            self._known[report.id] = report
        return self._known[kv_request_id]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
