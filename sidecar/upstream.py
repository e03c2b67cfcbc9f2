"""The client side: one HTTP call to an engine, its faults translated once.

Bodies are never unpacked, redirects never followed, cookies never kept, proxies of the environment
never used. Idle connections are kept for less time than the engine keeps them, and a request whose
reused connection turned out dead, without a byte of an answer, is sent once more over a new one.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from multidict import CIMultiDict

from sidecar.endpoint import HostPort
from sidecar.errors import (
    BodyInvalid,
    UpstreamDied,
    UpstreamError,
    UpstreamGarbage,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from sidecar.http.body import Body
from sidecar.http.client import ClientConnection, Received
from sidecar.http.message import (
    BodyOverLimit,
    HttpFault,
    PeerGone,
    PeerIdle,
    UploadBroken,
    request_bytes,
)
from sidecar.http.pool import ConnectionPool
from sidecar.telemetry import Telemetry
from sidecar.tracing.request import begin_leg


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to one engine. `leg` is the label in metrics and messages.

    A body in memory is framed here; one that is passed on is framed as `headers` say, else chunked."""

    leg: str
    address: HostPort
    method: str
    target: str  # path and query, byte for byte
    headers: CIMultiDict[str]
    body: bytes | Body | None = field(repr=False, default=None)


class Upstream:
    """A pool of connections; `name` is its label in metrics.

    `bind_host`: source address of them all (peers recognise us by it); `tls`:
    how they are secured, None for plain HTTP."""

    def __init__(
        self,
        telemetry: Telemetry,
        name: str,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        max_idle_per_host: int,
        bind_host: str | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._name = name
        self._idle_timeout_s = idle_timeout_s
        self._pool = ConnectionPool(
            connect_timeout_s=connect_timeout_s,
            idle_timeout_s=idle_timeout_s,
            keepalive_s=keepalive_s,
            max_idle_per_host=max_idle_per_host,
            bind_host=bind_host,
            tls=tls,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()

    @asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Received]:
        """The answer's head, its body still to be read; leaving early closes the connection.

        Raises:
            UpstreamError: nothing of an answer was received.
            BodyInvalid: the body that was passed on broke.
        """
        received = await self.open(call)
        try:
            yield received
        finally:
            received.close()

    async def open(self, call: Call) -> Received:
        """As `answer`; the caller must close what it gets."""
        started_s = time.monotonic()
        outcome = "cancelled"
        span = begin_leg(call.leg, call.headers)
        try:
            received = await self._open_with_retry(call)
            outcome = "ok" if received.status < 400 else f"status_{received.status // 100}xx"
            return received
        except UpstreamError as error:
            outcome = error.reason
            raise
        finally:
            if span is not None:
                span.set("server.address", str(call.address))
                span.end("" if outcome == "ok" else outcome)
            self._telemetry.leg_ended(call.leg, outcome, time.monotonic() - started_s)

    async def _open_with_retry(self, call: Call) -> Received:
        call.headers.setdefault("Host", str(call.address))
        if isinstance(call.body, bytes):
            call.headers["Content-Length"] = str(len(call.body))
        chunked = isinstance(call.body, Body) and "Content-Length" not in call.headers
        if chunked:
            call.headers["Transfer-Encoding"] = "chunked"
        head = request_bytes(call.method, call.target, call.headers)
        connection = self._pool.take(call.address)
        if connection is not None:
            self._telemetry.upstream_connection(self._name, "reused")
            try:
                return await self._call(connection, call, head, chunked)
            except UpstreamDied:
                if connection.heard or isinstance(call.body, Body):
                    raise
            self._telemetry.retried("stale_connection")
        try:
            connection = await self._pool.open(call.address)
        except OSError as error:  # TimeoutError and certificate errors, too
            raise UpstreamUnreachable(f"The {call.leg} endpoint cannot be reached") from error
        self._telemetry.upstream_connection(self._name, "opened")
        return await self._call(connection, call, head, chunked)

    async def _call(self, connection: ClientConnection, call: Call, head: bytes, chunked: bool) -> Received:
        where = f"The {call.leg} endpoint"
        try:
            return await connection.call(head, call.body, is_head=call.method == "HEAD", chunked=chunked)
        except PeerIdle as fault:
            raise UpstreamTimeout(f"{where} did not answer in {self._idle_timeout_s:g} s") from fault
        except PeerGone as fault:
            raise UpstreamDied(f"{where} closed the connection before it answered") from fault
        except UploadBroken as fault:
            raise BodyInvalid("The request body's framing is broken") from fault
        except HttpFault as fault:
            raise UpstreamGarbage(f"{where} did not answer in HTTP") from fault


async def read_bounded(received: Received, limit_bytes: int) -> bytes:
    """The whole body of an answer that is needed in memory.

    Raises:
        UpstreamError: broken off, or larger than `limit_bytes`.
    """
    try:
        return await received.body.whole(limit_bytes)
    except BodyOverLimit as fault:
        raise UpstreamGarbage(f"The prefill endpoint's answer is larger than {limit_bytes} bytes") from fault
    except HttpFault as fault:
        raise UpstreamDied("The prefill endpoint broke off its answer") from fault
