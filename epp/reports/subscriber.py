"""Listens to every engine's `PullFinished` reports and hands them on with the endpoint they came from.

Who says it is known from the connection, never from the message. One SUB socket and one task an endpoint;
an engine that floods costs its own queue (bounded, oldest kept, newest dropped by ZMQ) and a share of the
loop that is cut into slices. An engine without a reports port is simply not heard: its pulls end as unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import zmq
import zmq.asyncio

from engine_plugin.identity import EndpointId, format_address
from engine_plugin.pull_report import MAX_REPORT_BYTES, TOPIC, ReportError, decode
from epp.core.types import PullReport

log = logging.getLogger(__name__)

QUEUED_REPORTS: Final = 1000  # an endpoint
_SLICE: Final = 64  # messages handled before the loop gets a turn


class ReportSubscriber:
    """`upsert`, `announce`, `remove` and `run` belong to one event loop."""

    def __init__(
        self,
        on_report: Callable[[EndpointId, PullReport], None],
        on_bad: Callable[[EndpointId], None] = lambda _: None,
    ) -> None:
        """`on_bad` hears of every message that is no report."""
        self._on_report = on_report
        self._on_bad = on_bad
        self._hosts: dict[EndpointId, str] = {}
        self._wanted: dict[EndpointId, tuple[str, int]] = {}
        self._tasks: dict[EndpointId, asyncio.Task[None]] = {}
        self._running: tuple[asyncio.TaskGroup, zmq.asyncio.Context] | None = None

    def upsert(self, endpoint: EndpointId, host: str) -> None:
        """An endpoint at this address; its port is announced by itself. Another address is another
        engine, which has announced nothing yet."""
        if self._hosts.get(endpoint) != host:
            self.remove(endpoint)
            self._hosts[endpoint] = host

    def announce(self, endpoint: EndpointId, reports_port: str) -> None:
        """The `reports_port` label of the engine's info; cheap when it is the one known."""
        host = self._hosts.get(endpoint)
        if host is None or not reports_port.isascii() or not reports_port.isdigit() or len(reports_port) > 5:
            return
        address = (host, int(reports_port))
        if self._wanted.get(endpoint) == address or not 0 < address[1] < 65_536:
            return
        self._stop(endpoint)
        self._wanted[endpoint] = address
        self._start(endpoint, address)

    def remove(self, endpoint: EndpointId) -> None:
        """Nothing of this endpoint is handed on after this call."""
        self._hosts.pop(endpoint, None)
        self._stop(endpoint)

    def _stop(self, endpoint: EndpointId) -> None:
        self._wanted.pop(endpoint, None)
        task = self._tasks.pop(endpoint, None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        """Listen until cancelled; every socket is closed when this returns."""
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, min(65_536, context.get(zmq.SOCKET_LIMIT)))
        try:
            async with asyncio.TaskGroup() as group:
                self._running = group, context
                for endpoint, address in self._wanted.items():
                    self._start(endpoint, address)
                await asyncio.Event().wait()
        finally:
            self._running = None
            self._tasks.clear()
            context.destroy(linger=0)

    def _start(self, endpoint: EndpointId, address: tuple[str, int]) -> None:
        if self._running is not None:
            group, context = self._running
            self._tasks[endpoint] = group.create_task(self._listen(context, endpoint, address))

    async def _listen(
        self, context: zmq.asyncio.Context, endpoint: EndpointId, address: tuple[str, int]
    ) -> None:
        try:
            socket = _connect(context, address)
        except zmq.ZMQError as error:
            log.error("reports of endpoint %s cannot be received: %s", endpoint, error.strerror)
            return
        try:
            while True:
                for _ in range(_SLICE):
                    self._handle(endpoint, await socket.recv_multipart())
                await asyncio.sleep(0)  # a full queue never suspends `recv`
        finally:
            socket.close(0)

    def _handle(self, endpoint: EndpointId, frames: list[bytes]) -> None:
        try:
            said = decode(frames)
        except ReportError:
            self._on_bad(endpoint)
            return
        report = PullReport(
            said.id,
            said.source,
            said.asked_tokens,
            said.received_tokens,
            said.received_bytes,
            said.reason,
            said.ms,
        )
        try:
            self._on_report(endpoint, report)
        except Exception:  # task guard: a report must not end the picker
            log.exception("a report of endpoint %s met a fault of the picker", endpoint)


def _connect(context: zmq.asyncio.Context, address: tuple[str, int]) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    try:
        socket.ipv6 = ":" in address[0]
        socket.rcvhwm = QUEUED_REPORTS
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
        socket.subscribe(TOPIC)
        socket.connect(f"tcp://{format_address(address)}")
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket
