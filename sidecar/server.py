"""The life of a sidecar process: bind, serve, drain, stop. One listener a rank.

Shutdown: health turns off and the ports close first, then open streams have the drain time, then
they are cancelled. Everything that was started is stopped, in the other order.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from sidecar import wire
from sidecar.allowlist import AllowList, EndpointFileWatch
from sidecar.bootstrap import EngineIds
from sidecar.config import ANY_HOST, SidecarConfig
from sidecar.endpoint import HostPort
from sidecar.legs import LegRules, SplitLegs
from sidecar.listener import Binding, Listener
from sidecar.pages import Pages
from sidecar.peer_health import PeerHealth
from sidecar.plan import RoutingRules
from sidecar.plan import Self as OwnRank
from sidecar.pool_members import PoolReference, watch_members
from sidecar.prefill import PrefillLeg
from sidecar.proxy import Proxy, ProxyRules
from sidecar.routing_auth import RoutingClaims, sign_routing
from sidecar.telemetry import Telemetry, metrics_app
from sidecar.tls import ClientContexts, server_context
from sidecar.tracing.exporter import SpanExporter
from sidecar.upstream import Upstream

_log = logging.getLogger(__name__)


class Sidecar:
    """A running sidecar. Use as an async context manager; leaving it drains and stops.

    Raises on entering:
        EndpointFileError: the endpoint file cannot be used.
        CertificateError: the mounted certificate cannot be used.
        OSError: a port cannot be bound.
    """

    def __init__(self, config: SidecarConfig, telemetry: Telemetry | None = None) -> None:
        self._config = config
        self.telemetry = telemetry or Telemetry()
        self.health = PeerHealth(self.telemetry)
        self.allow_list = AllowList(enforced=config.enforce_allow_list)
        self._proxies: list[Proxy] = []
        self._listeners: list[Listener] = []
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

    def refuse_new(self) -> None:
        """From now on a request is answered 503, so that a gateway takes it elsewhere."""
        for proxy in self._proxies:
            proxy.draining = True

    async def drain(self) -> None:
        """Stop accepting; let open requests end, for at most the drain time."""
        self.refuse_new()
        for listener in self._listeners:
            listener.stop_accepting()
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
        if config.inference_pool is not None:
            pool = PoolReference(config.inference_pool, config.pool_group, config.p2p_base_port)
            await stack.enter_async_context(watch_members(pool, self.allow_list, self.telemetry))
        tls = server_context(config.cert_path) if config.secure else None
        engine = self._upstream(None, "decoder")
        stack.push_async_callback(engine.close)
        own_host = config.listen_host if config.listen_host not in ANY_HOST else None
        bootstrap = self._upstream(None, "bootstrap")
        stack.push_async_callback(bootstrap.close)
        engine_ids = EngineIds(bootstrap, config.bootstrap_port)
        peers = self._upstream(own_host, "prefiller")
        stack.push_async_callback(peers.close)
        prefill = PrefillLeg(
            peers, self.health, self.telemetry, self._leg_headers, max_answer_bytes=config.max_body_bytes
        )
        tracer = None
        if config.tracing is not None:
            exporter = SpanExporter(config.tracing)
            tracer = exporter.tracer()
            self.telemetry.watch_spans(exporter)
            stack.push_async_callback(_cancelled, asyncio.create_task(exporter.run()))
        legs = SplitLegs(
            engine, prefill, self._leg_rules(), self.allow_list, self.health, engine_ids, self.telemetry
        )
        for rank in config.served_ranks:
            proxy = Proxy(
                self._proxy_rules(rank), self.allow_list, engine, legs, self.health, self.telemetry, tracer
            )
            await self._listen(stack, proxy, config.port + rank, tls)
        self.telemetry.count_clients(lambda: sum(listener.connections for listener in self._listeners))
        if config.metrics_port:
            await self._serve_metrics(stack)

    def _upstream(self, bind_host: str | None, leg: str) -> Upstream:
        config = self._config
        verify = leg not in config.unverified_legs
        return Upstream(
            self.telemetry,
            leg,
            connect_timeout_s=config.connect_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            keepalive_s=config.upstream_keepalive_s,
            max_idle_per_host=config.max_idle_per_host,
            bind_host=bind_host,
            tls=ClientContexts(verify=verify) if leg in config.tls_legs else None,
        )

    async def _listen(
        self, stack: AsyncExitStack, proxy: Proxy, port: int, tls: ssl.SSLContext | None
    ) -> None:
        config = self._config
        binding = Binding(config.listen_host, port, tls, config.head_timeout_s, config.idle_timeout_s)
        listener = Listener(binding, proxy.handle)
        stack.push_async_callback(listener.close)
        await listener.start()
        self._proxies.append(proxy)
        self._listeners.append(listener)

    async def _serve_metrics(self, stack: AsyncExitStack) -> None:
        config = self._config
        tls = None if config.metrics_cert_dir is None else server_context(config.metrics_cert_dir)
        pages = await Pages.start(metrics_app(self.telemetry), config.listen_host, config.metrics_port, tls)
        stack.push_async_callback(pages.close)

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
        )

    def _leg_rules(self) -> LegRules:
        config = self._config
        return LegRules(
            connector=config.connector,
            prefill_max_retries=config.prefill_max_retries,
            prefill_retry_backoff_s=config.prefill_retry_backoff_s,
            prefill_failure_local=config.prefill_failure_local,
            prefill_timeout_s=config.prefill_timeout_s,
            bootstrap_port=config.bootstrap_port,
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
