"""The client side: one HTTP call to an engine, its faults translated once.

Bodies are never unpacked, redirects never followed, cookies never kept, proxies of the environment
never used. Idle connections are kept for less time than the engine keeps them, and a request whose
reused connection turned out dead is sent once more over a new one.
"""

from __future__ import annotations

import asyncio
import io
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from sidecar.endpoint import HostPort
from sidecar.errors import (
    UpstreamDied,
    UpstreamError,
    UpstreamGarbage,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from sidecar.telemetry import Telemetry
from sidecar.tracing.request import begin_leg

_MAX_FIELD_BYTES: Final = 64 << 10
_MAX_HEADERS: Final = 512
_CHUNKED_WRITE_BYTES: Final = 512 << 10  # larger bodies are written piece by piece
_NO_AUTO_HEADERS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to one engine. `leg` is the label in metrics and messages."""

    leg: str
    address: HostPort
    method: str
    target: str  # path and query, byte for byte
    headers: CIMultiDict[str]
    body: bytes | AsyncIterable[bytes] | None = field(repr=False, default=None)

    def url(self, scheme: str) -> URL:
        return URL(f"{scheme}://{self.address}{self.target}", encoded=True)


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
        bind_host: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._name = name
        self._idle_timeout_s = idle_timeout_s
        self._connect_timeout_s = connect_timeout_s
        local = (bind_host, 0) if bind_host else None
        self._scheme = "http" if tls is None else "https"
        verify = True if tls is None else tls
        self._pooled = self._session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s, local_addr=local, ssl=verify)
        )
        self._fresh = self._session(
            aiohttp.TCPConnector(limit=0, force_close=True, local_addr=local, ssl=verify)
        )

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(self._reused)
        trace.on_connection_create_end.append(self._opened)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTO_HEADERS,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            max_headers=_MAX_HEADERS,
            trace_configs=[trace],
        )

    async def _reused(
        self,
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _params: aiohttp.TraceConnectionReuseconnParams,
    ) -> None:
        context.trace_request_ctx.reused = True
        self._telemetry.upstream_connection(self._name, "reused")

    async def _opened(
        self,
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        _params: aiohttp.TraceConnectionCreateEndParams,
    ) -> None:
        self._telemetry.upstream_connection(self._name, "opened")

    async def close(self) -> None:
        """Close every connection."""
        await self._pooled.close()
        await self._fresh.close()

    @asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's head, its body still to be read; leaving early closes the connection.

        Raises:
            UpstreamError: nothing of an answer was received.
        """
        response = await self.open(call)
        try:
            yield response
        finally:
            response.close()

    async def open(self, call: Call) -> aiohttp.ClientResponse:
        """As `answer`; the caller must close the response."""
        started_s = time.monotonic()
        outcome = "cancelled"
        span = begin_leg(call.leg, call.headers)
        try:
            response = await self._open_with_retry(call)
            outcome = "ok" if response.status < 400 else f"status_{response.status // 100}xx"
            return response
        except UpstreamError as error:
            outcome = error.reason
            raise
        finally:
            if span is not None:
                span.set("server.address", str(call.address))
                span.end("" if outcome == "ok" else outcome)
            self._telemetry.leg_ended(call.leg, outcome, time.monotonic() - started_s)

    async def _open_with_retry(self, call: Call) -> aiohttp.ClientResponse:
        attempt = SimpleNamespace(reused=False)
        try:
            return await self._open_once(self._pooled, call, attempt)
        except UpstreamDied:
            if not attempt.reused or isinstance(call.body, AsyncIterable):
                raise
        self._telemetry.retried("stale_connection")
        return await self._open_once(self._fresh, call, attempt)

    async def _open_once(
        self, session: aiohttp.ClientSession, call: Call, attempt: SimpleNamespace
    ) -> aiohttp.ClientResponse:
        large = isinstance(call.body, bytes) and len(call.body) > _CHUNKED_WRITE_BYTES
        body = io.BytesIO(call.body) if large and isinstance(call.body, bytes) else call.body
        where = f"The {call.leg} endpoint"
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await session.request(
                    call.method,
                    call.url(self._scheme),
                    headers=call.headers,
                    data=body,
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamUnreachable(f"{where} cannot be reached") from error
        except TimeoutError as error:
            raise UpstreamTimeout(f"{where} did not answer in {self._idle_timeout_s:g} s") from error
        except (aiohttp.ClientConnectionError, ConnectionError) as error:
            raise UpstreamDied(f"{where} closed the connection before it answered") from error
        except aiohttp.ClientError as error:
            raise UpstreamGarbage(f"{where} did not answer in HTTP") from error


async def read_bounded(answer: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body of an answer that is needed in memory.

    Raises:
        UpstreamError: broken off, or larger than `limit_bytes`.
    """
    pieces = bytearray()
    try:
        while piece := await answer.content.readany():
            pieces += piece
            if len(pieces) > limit_bytes:
                raise UpstreamGarbage(f"The prefill endpoint's answer is larger than {limit_bytes} bytes")
    except (aiohttp.ClientError, ConnectionError) as error:
        raise UpstreamDied("The prefill endpoint broke off its answer") from error
    return bytes(pieces)
