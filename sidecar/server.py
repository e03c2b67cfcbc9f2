"""The life of a sidecar process: bind, serve, drain, stop. One listener a rank.

Shutdown: health turns off and the ports close first, then open streams have the drain time, then
they are cancelled. Everything that was started is stopped, in the other order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sidecar import wire
from sidecar.allowlist import AllowList, EndpointFileWatch
from sidecar.config import ANY_HOST, SidecarConfig
from sidecar.endpoint import HostPort
from sidecar.legs import LegRules, SplitLegs
from sidecar.peer_health import PeerHealth
from sidecar.plan import RoutingRules
from sidecar.plan import Self as OwnRank
from sidecar.prefill import PrefillLeg
from sidecar.proxy import Proxy, ProxyRules
from sidecar.relay import strip_library_headers
from sidecar.routing_auth import RoutingClaims, sign_routing
from sidecar.telemetry import Telemetry, metrics_app
from sidecar.upstream import Upstream

_log = logging.getLogger(__name__)

_MAX_FIELD_BYTES: Final = 64 << 10
_MAX_HEADERS: Final = 512
_CANCEL_GRACE_S: Final = 1.0  # for handlers to end after the drain time is over
_CLIENT_KEEPALIVE_S: Final = 3630.0  # longer than the gateway's hour
_LINGER_S: Final = 2.0  # to let a refused client read its answer before we stop reading its body


class _NoPayload(logging.Filter):
    """Parse errors quote the bytes they stumbled over, which may be a prompt: keep their type."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "refused a request that is not HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True


_http_log = logging.getLogger("sidecar.http")
_http_log.addFilter(_NoPayload())


class Sidecar:
    """A running sidecar. Use as an async context manager; leaving it drains and stops.

    Raises on entering:
        EndpointFileError: the endpoint file cannot be used.
        OSError: a port cannot be bound.
    """

    def __init__(self, config: SidecarConfig, telemetry: Telemetry | None = None) -> None:
        self._config = config
        self.telemetry = telemetry or Telemetry()
        self.health = PeerHealth(self.telemetry)
        self.allow_list = AllowList(enforced=config.enforce_allow_list)
        self._proxies: list[Proxy] = []
        self._runners: list[web.AppRunner] = []
        self._sites: list[web.TCPSite] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._stack:
            await self.drain()

    @property
    def addresses(self) -> list[str]:
        """What the listeners are bound to, in the order of their ranks."""
        return [f"{self._config.listen_host}:{self._config.port + r}" for r in self._config.served_ranks]

    async def drain(self) -> None:
        """Stop accepting; let open requests end, for at most the drain time."""
        for proxy in self._proxies:
            proxy.draining = True
        for site in self._sites:
            await site.stop()
        self._sites.clear()
        for runner in self._runners:
            if runner.server is not None:
                runner.server.pre_shutdown()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                for proxy in self._proxies:
                    await proxy.wait_idle()
        except TimeoutError:
            _log.warning("requests still open after %g s are cancelled", self._config.drain_timeout_s)

    # --- start ---------------------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self._config
        if config.routing_key is None:
            _log.warning("no --routing-key-file: routing headers are believed by the allow-list alone")
        if config.endpoints_file is not None:
            watch = EndpointFileWatch(
                config.endpoints_file, self.allow_list, self.telemetry, p2p_base_port=config.p2p_base_port
            )
            watch.load_first()
            task = asyncio.create_task(watch.run())
            stack.push_async_callback(_cancelled, task)
        engine = self._upstream(None)
        stack.push_async_callback(engine.close)
        peers = self._upstream(config.listen_host if config.listen_host not in ANY_HOST else None)
        stack.push_async_callback(peers.close)
        prefill = PrefillLeg(
            peers, self.health, self.telemetry, self._leg_headers, max_answer_bytes=config.max_body_bytes
        )
        legs = SplitLegs(engine, prefill, self._leg_rules(), self.allow_list, self.health, self.telemetry)
        for rank in config.served_ranks:
            proxy = Proxy(self._proxy_rules(rank), self.allow_list, engine, legs, self.health, self.telemetry)
            await self._listen(stack, proxy, config.port + rank)
        if config.metrics_port:
            await self._serve_metrics(stack)

    def _upstream(self, bind_host: str | None) -> Upstream:
        config = self._config
        return Upstream(
            self.telemetry,
            connect_timeout_s=config.connect_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            keepalive_s=config.upstream_keepalive_s,
            bind_host=bind_host,
        )

    async def _listen(self, stack: AsyncExitStack, proxy: Proxy, port: int) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        app.on_response_prepare.append(strip_library_headers)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            lingering_time=_LINGER_S,
            handler_cancellation=True,  # a client that leaves cancels its request, and so its legs
            auto_decompress=False,
            keepalive_timeout=_CLIENT_KEEPALIVE_S,
            shutdown_timeout=_CANCEL_GRACE_S,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            max_headers=_MAX_HEADERS,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self._config.listen_host, port)
        await site.start()
        self._proxies.append(proxy)
        self._runners.append(runner)
        self._sites.append(site)

    async def _serve_metrics(self, stack: AsyncExitStack) -> None:
        runner = web.AppRunner(metrics_app(self.telemetry), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self._config.listen_host, self._config.metrics_port).start()

    # --- views of the configuration --------------------------------------------------------------

    def _proxy_rules(self, rank: int) -> ProxyRules:
        config = self._config
        routing = RoutingRules(
            connector=config.connector,
            pull_enabled=config.pull_enabled,
            p2p_base_port=config.p2p_base_port,
            base_port=config.port,
            ranks=config.ranks,
            sample_prefiller=config.sample_prefiller,
        )
        return ProxyRules(
            routing=routing,
            own=OwnRank(config.pod_ip, rank),
            serving=HostPort(config.pod_ip or config.listen_host, config.port + rank),
            engine_host=config.model_server_host,
            engine_base_port=config.model_server_port,
            routing_key=config.routing_key,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=config.body_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )

    def _leg_rules(self) -> LegRules:
        config = self._config
        return LegRules(
            connector=config.connector,
            prefill_max_retries=config.prefill_max_retries,
            prefill_retry_backoff_s=config.prefill_retry_backoff_s,
            prefill_failure_local=config.prefill_failure_local,
            prefill_timeout_s=config.prefill_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )

    def _leg_headers(self, request_id: str, destination: HostPort) -> Mapping[str, str]:
        """What tells a peer's sidecar that the kv_transfer_params of a prefill leg are ours."""
        headers = {wire.LEG: wire.LEG_PREFILL}
        if self._config.routing_key is not None:
            claims = RoutingClaims.of_leg(request_id, str(destination), wire.LEG_PREFILL)
            headers[wire.ROUTING_AUTH] = sign_routing(self._config.routing_key, claims, now_s=time.time())
        return headers


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
