"""The one place that builds the ext-proc and health servers, with every limit set on purpose.

Life: `start`, `serve`, `drain` (unready, still accepting; then no new streams, the old ones end), `stop`.
All run modes of the picker use this, so that no option applies in one of them only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from epp.core.errors import ConfigError
from epp.extproc import tls
from epp.extproc.health import Health
from epp.extproc.service import ExtProcService, Limits, RequestHandler, ServiceStats

_MESSAGE_OVERHEAD_BYTES = 2**20  # headers, attributes and metadata beside a buffered body
_SETTLE_S = 1.0  # what cancelled handlers get to end


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and how to listen. Port 0: any free one, see `ExtProcServer.port`."""

    host: str = "0.0.0.0"
    port: int = 9002
    health_host: str = "0.0.0.0"
    health_port: int | None = 9003  # None: health on the ext-proc port only
    secure: bool = True
    cert_path: Path | None = None  # directory with tls.crt and tls.key; None: self-signed
    cert_reload: bool = True
    max_receive_bytes: int | None = None  # None: a whole buffered body and a MiB around it
    max_send_bytes: int | None = None
    max_concurrent_streams: int = 16_384  # per connection; a gateway opens few, each holds all its streams
    handshake_timeout_s: float = 10.0  # TLS and HTTP/2, from the connect on: who says nothing is shut out
    keepalive_s: float = 30.0  # a gateway that vanished is noticed after this + keepalive_timeout_s
    keepalive_timeout_s: float = 10.0
    lame_duck_s: float = 5.0  # unready but accepting: what a gateway needs to notice
    drain_timeout_s: float = 30.0
    limits: Limits = field(default_factory=Limits)


class ExtProcServer:
    """Serves `handler` until `request_stop`; `ready` answers the health checks."""

    def __init__(
        self,
        handler: RequestHandler,
        *,
        ready: Callable[[], bool],
        settings: ServerSettings = ServerSettings(),
    ) -> None:
        self.settings = settings
        self.health = Health(ready)
        self.service = ExtProcService(handler, settings.limits)
        self.port = 0
        self.health_port: int | None = None
        self._stop_requested = asyncio.Event()
        self._servers: list[grpc.aio.Server] = []

    @property
    def stats(self) -> ServiceStats:
        return self.service.stats

    async def run(self) -> None:
        """`start` and `serve`."""
        await self.start()
        await self.serve()

    async def serve(self) -> None:
        """Until `request_stop`, then drain and stop; a cancel stops at once."""
        try:
            await self._stop_requested.wait()
            await self.drain(self.settings.drain_timeout_s)
        finally:
            await self.stop()

    def request_stop(self) -> None:
        self._stop_requested.set()

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ConfigError: an address cannot be bound, or the certificate cannot be used.
        """
        settings = self.settings
        ext_proc = grpc.aio.server(options=_options(settings))
        ext_proc.add_generic_rpc_handlers((self.service.rpc_handler(), self.health.rpc_handler()))
        credentials = None
        if settings.secure:
            credentials = tls.credentials(settings.cert_path, reload=settings.cert_reload)
        self.port = _bind(ext_proc, settings.host, settings.port, credentials)
        self._servers = [ext_proc]
        if settings.health_port is not None:
            health = grpc.aio.server(options=_options(settings))
            health.add_generic_rpc_handlers((self.health.rpc_handler(),))
            self.health_port = _bind(health, settings.health_host, settings.health_port, None)
            self._servers.append(health)
        for server in self._servers:
            await server.start()

    async def drain(self, deadline_s: float) -> None:
        """Turn unready, go on accepting for `lame_duck_s` so that gateways can notice, then take no
        new stream and let the old ones end. Returns after `deadline_s` at the latest, by then with
        every stream ended."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + deadline_s
        self.health.drain()
        await asyncio.sleep(min(self.settings.lame_duck_s, deadline_s))
        if self._servers:
            await _stop(self._servers[0], max(0.0, ends_s - loop.time()))

    async def stop(self) -> None:
        """End everything now. Idempotent; health goes last."""
        servers, self._servers = self._servers, []
        for server in servers:
            await _stop(server, 0.0)
        await self.service.settle(_SETTLE_S)


async def _stop(server: grpc.aio.Server, grace_s: float) -> None:
    """No new streams; the old ones are cancelled after `grace_s`. Bounded even if gRPC is not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s + _SETTLE_S):
            await server.stop(grace_s or None)


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    whole_body = settings.limits.max_body_bytes + _MESSAGE_OVERHEAD_BYTES
    return [
        ("grpc.max_receive_message_length", settings.max_receive_bytes or whole_body),
        ("grpc.max_send_message_length", settings.max_send_bytes or whole_body),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        # streams that came while the loop was busy; the library's own 1,000 refuses some of a burst at random
        ("grpc.server.max_pending_requests", settings.max_concurrent_streams),
        ("grpc.server.max_pending_requests_hard_limit", 4 * settings.max_concurrent_streams),
        ("grpc.server_handshake_timeout_ms", int(settings.handshake_timeout_s * 1000)),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # else ours stop after two and prove nothing
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # gateways may ping this often
        ("grpc.so_reuseport", 0),  # a second picker on the port is an error, not half the traffic
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound = 0
    with contextlib.suppress(RuntimeError):  # gRPC's text names no reason
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    if bound == 0:
        raise ConfigError(f"cannot listen on {address}: is the port taken, or the address not ours?")
    return bound
