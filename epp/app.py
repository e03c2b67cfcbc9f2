"""Composition root of the picker: builds the parts, joins shells that do not know each other, runs them.

The only place that knows all shells. Order of a stop: unready -> stop accepting -> drain -> cancel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge

from engine_plugin.identity import EndpointId
from epp import key_files
from epp.config import EXACT_TOKENS_NEEDED, EppConfig, load_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.index_choice import IndexChoice, choose_index
from epp.core.index_limits import IndexLimits
from epp.core.types import PullReport
from epp.debug import build_debug_app
from epp.director import Director
from epp.discovery import EndpointCallbacks, Inputs, build_inputs
from epp.endpoints.file_source import endpoint_of, scrape_target_of
from epp.endpoints.metrics_parser import MetricsPage
from epp.endpoints.scraper import MetricsScraper
from epp.extproc.server import ExtProcServer, ServerSettings
from epp.extproc.service import Limits
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from epp.kvevents.packed_codec import choose_decoder
from epp.replicas import Replicas, ReplicaSettings
from epp.reports.subscriber import ReportSubscriber
from epp.request.back_end import TokeniserPlan
from epp.request.render import RenderTokeniser
from epp.request.tokenise import LocalTokeniser
from epp.siblings.client import ClientSettings, SiblingAddress
from epp.siblings.reader import ReadLimits
from epp.telemetry.kv_events import KvEventsCollector
from epp.telemetry.ledger import DecisionLedger
from epp.telemetry.ledger_file import LedgerFile
from epp.telemetry.logs import setup_logging
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector, StreamCollector
from epp.telemetry.pull_metrics import PullMetrics
from epp.telemetry.request_metrics import DegradedCollector
from epp.telemetry.snapshots import SnapshotCollector
from epp.telemetry.tokeniser_metrics import TokeniserCollector
from epp.thresholds.in_force import ThresholdState
from sidecar.endpoint_file import EndpointRow
from sidecar.pool_watch.metrics import WatchCollector

log = logging.getLogger(__name__)

# The event loop waits at most this long for a thread that runs Python (chat templates do, for milliseconds)
SWITCH_INTERVAL_S = 0.001


def serve(arguments: argparse.Namespace) -> int:
    """Run the picker until SIGTERM or SIGINT.

    Raises:
        ConfigError: a configuration that must not start, or a port that is taken.
    """
    try:
        setup_logging(arguments.log_level)
    except ValueError as error:
        raise ConfigError(f"--log-level: {error}") from error
    config = load_config(arguments.config_file)
    for note in config.notes:
        log.warning("%s", note)
    _check_ready_fd(arguments.ready_fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        uvloop.run(_run(arguments, config))
    except ConfigError:
        raise
    except Exception:
        log.exception("the picker ended by a fault of its own")
        return 1
    return 0


async def _run(arguments: argparse.Namespace, config: EppConfig) -> None:
    """A sibling's snapshot comes before everything else: it brings the seed of the index."""
    choice = choose_index()
    log.info("prefix index: %s %s", choice.implementation, choice.reason)
    replicas = Replicas(_replica_settings(arguments))
    seed = await replicas.take_seed(key_files.index_seed(arguments.index_seed_file), choice.scheme)
    await _App(arguments, config, choice, seed, replicas).run()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Components with a `run()` of their own, besides the ext-proc server."""

    scraper: MetricsScraper
    events: KvEventsManager
    reports: ReportSubscriber


class _App:
    def __init__(
        self,
        arguments: argparse.Namespace,
        config: EppConfig,
        choice: IndexChoice,
        seed: bytes,
        replicas: Replicas,
    ) -> None:
        self._arguments = arguments
        staleness_s = arguments.metrics_staleness_threshold
        self._replicas = replicas
        self._metrics_port = 0  # until it is bound
        self._decoder = choose_decoder(choice.implementation)
        log.info("decoder of KV events: %s %s", self._decoder.implementation, self._decoder.reason)
        self._picker = EndpointPicker(
            replace(
                config.settings, metrics_staleness_s=staleness_s, pull_deadline_s=arguments.pull_deadline
            ),
            CacheView(
                choice.make(seed, IndexLimits(max_bytes=arguments.index_max_bytes)),
                salt_key=key_files.salt_key(arguments.salt_key_file),
                speculation=config.speculation,
            ),
        )
        self._refusals = PeerRefusals()
        self._registry = CollectorRegistry()
        self._pull_metrics = PullMetrics(self._registry)
        self._parts = self._build_parts()
        self._inputs: Inputs = build_inputs(
            arguments,
            config,
            EndpointCallbacks(self._upsert, self._remove),
            self._picker.sources.set_thresholds,
        )
        self._ledger = DecisionLedger(
            self._picker, self._pull_metrics, self._registry, _ledger_file(arguments)
        )
        self._tokeniser = self._build_tokeniser(config)
        self._director = Director(
            self._picker,
            self._tokeniser,
            PickerMetrics(self._registry),
            routing_key=key_files.routing_key(arguments.routing_key_file),
        )
        self._server = ExtProcServer(
            self._director, ready=self._inputs.ready, settings=_server_settings(arguments)
        )
        if self._tokeniser is not None:
            self._registry.register(TokeniserCollector(self._tokeniser))
        self._registry.register(StreamCollector(self._open_streams))
        self._registry.register(DegradedCollector(lambda: self._server.stats.degraded))
        self._registry.register(WatchCollector(lambda: self._inputs.watches, time.monotonic))
        self._registry.register(PoolCollector(self._picker, self._threshold_state, self._refusals))
        implementation = Gauge(
            "kvpull_epp_index_info", "1: the index in use.", ["implementation"], registry=self._registry
        )
        implementation.labels(choice.implementation).set(1)
        self._registry.register(SnapshotCollector(replicas.facts))
        self._registry.register(KvEventsCollector(self._picker, self._parts.events))
        replicas.serve_from(self._picker, seed, choice.scheme, self._events_address)

    def _build_parts(self) -> _Parts:
        scraper = MetricsScraper(
            on_metrics=self._picker.update_metrics,
            on_page=self._on_page,
            clock=time.monotonic,
            rng=random.Random(),
            interval_s=self._arguments.refresh_metrics_interval,
        )
        return _Parts(
            scraper=scraper,
            events=KvEventsManager(self._picker.cache, decode=self._decoder.decode),
            reports=ReportSubscriber(self._on_report, lambda _: self._count_report("malformed")),
        )

    def _build_tokeniser(self, config: EppConfig) -> LocalTokeniser | RenderTokeniser | None:
        arguments, picker = self._arguments, self._picker
        tokeniser = TokeniserPlan(
            parameters=config.tokens,
            directory=arguments.tokenizer,
            budget_s=arguments.tokenizer_budget,
            members=lambda: [endpoint.address for endpoint in picker.endpoints],
        ).build()
        if tokeniser is None and config.precise is not None:
            raise ConfigError(
                f"nothing knows the engines' tokens: {EXACT_TOKENS_NEEDED}, or give --tokenizer"
            )
        if tokeniser is None:
            log.warning("no tokenizer configured: every request is routed by load, and nothing is pulled")
        return tokeniser

    # --- what engines say -------------------------------------------------------------------------
    def _on_page(self, endpoint: EndpointId, page: MetricsPage) -> None:
        self._refusals.update(endpoint, page.peer_refused)
        self._picker.update_refusals(endpoint, page.peer_refused, time.monotonic())
        self._parts.reports.announce(endpoint, page.info_labels.get("reports_port", ""))

    def _on_report(self, endpoint: EndpointId, report: PullReport) -> None:
        self._count_report("joined" if self._picker.pull_finished(report, endpoint) else "unmatched")

    def _count_report(self, result: str) -> None:
        self._pull_metrics.reports.labels(result).inc()

    # --- the pool changes -------------------------------------------------------------------------
    def _upsert(self, row: EndpointRow, draining: bool = False) -> None:
        source = EventSource(row.host, row.events_port, row.replay_port or None)
        endpoint = replace(endpoint_of(row), draining=draining)
        if self._picker.upsert_endpoint(endpoint, has_replay=source.has_replay):
            self._parts.events.remove_endpoint(row.id)  # a fresh view needs a fresh subscription
            subscribe = partial(self._parts.events.add_endpoint, row.id, source)
            self._replicas.offer(self._picker, row.id, source.host, source.events_port, subscribe)
        elif not self._replicas.is_adopting(row.id):
            self._parts.events.add_endpoint(row.id, source)
        self._parts.reports.upsert(row.id, row.host)
        self._parts.scraper.upsert(scrape_target_of(row))
        log.info("endpoint %s at %s%s", row.id, row.serving, " is draining" if draining else "")

    def _remove(self, endpoint: EndpointId) -> None:
        self._parts.scraper.remove(endpoint)
        self._parts.reports.remove(endpoint)
        self._parts.events.remove_endpoint(endpoint)
        self._replicas.withdraw(endpoint)
        self._picker.remove_endpoint(endpoint)
        self._refusals.forget(endpoint)
        log.info("endpoint %s has left", endpoint)

    def _events_address(self, endpoint: EndpointId) -> tuple[str, int] | None:
        source = self._parts.events.source(endpoint)
        return None if source is None else (source.host, source.events_port)

    def _event_ports(self, endpoint: EndpointId) -> dict[str, int | None]:
        source = self._parts.events.source(endpoint)
        if source is None:
            return {}
        return {"events_port": source.events_port, "replay_port": source.replay_port}

    def _threshold_state(self) -> ThresholdState:
        return self._inputs.thresholds.state

    def _open_streams(self) -> dict[str, int]:
        stats = self._server.stats
        return {"streams": stats.streams_open, "deciding": stats.deciding, "decisions": stats.decisions_open}

    # --- life -------------------------------------------------------------------------------------
    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._server.request_stop)
        await self._inputs.open()
        web_runner = await self._start_debug()
        expiry = loop.call_later(self._replicas.keep_s, self._replicas.expire)
        background = [asyncio.create_task(_forever(part)) for part in self._background()]
        try:
            await self._serve_with(background)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            expiry.cancel()
            await self._ledger.aclose()
            await self._inputs.close()
            await web_runner.cleanup()
            if self._tokeniser is not None:
                await self._tokeniser.aclose()
        log.info("stopped")

    def _background(self) -> list[Awaitable[None]]:
        parts = self._parts
        running: list[Awaitable[None]] = [
            parts.scraper.run(),
            parts.events.run(),
            self._inputs.run(),
            parts.reports.run(),
            self._ledger.run(),
        ]
        if self._replicas.server is not None:
            running.append(self._replicas.server.run())
        return running

    async def _serve_with(self, background: list[asyncio.Task[None]]) -> None:
        """Serve until asked to stop; a component that ends early is a fault and ends the picker."""
        await self._server.start()
        serving = asyncio.create_task(self._server.serve())
        reporting = asyncio.create_task(self._report_ready())
        try:
            done, _ = await asyncio.wait([serving, *background], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reporting.cancel()
        ended = [task for task in background if task in done]
        if ended:
            log.error("a component has ended; draining, then stopping")
            self._server.request_stop()
        await serving
        for task in ended:
            await task

    async def _start_debug(self) -> web.AppRunner:
        arguments = self._arguments
        app = build_debug_app(
            self._picker,
            self._registry,
            self._threshold_state,
            key_files.debug_token(arguments.debug_token_file),
            token_ids=self._director.token_ids,
            ports=self._event_ports,
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, arguments.listen_host, arguments.metrics_port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"metrics port {arguments.listen_host}:{arguments.metrics_port}: {error.strerror}"
            ) from error
        self._metrics_port = int(runner.addresses[0][1])
        return runner

    async def _report_ready(self) -> None:
        await self._inputs.wait_ready()
        log.info("serving ext-proc on port %d", self._server.port)
        if self._arguments.ready_fd is not None:
            given = self._replicas.server
            line = {
                "ready": True,
                "grpc_port": self._server.port,
                "health_port": self._server.health_port,
                "metrics_port": self._metrics_port,
                "snapshot_port": None if given is None else given.port,
            }
            with os.fdopen(self._arguments.ready_fd, "w") as pipe:
                pipe.write(json.dumps(line) + "\n")


async def _forever(part: Awaitable[None]) -> None:
    await part
    raise RuntimeError("a component that runs for ever has ended")


def _check_ready_fd(fd: int | None) -> None:
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError as error:
        raise ConfigError(f"--ready-fd {fd}: {error.strerror}") from error


def _server_settings(arguments: argparse.Namespace) -> ServerSettings:
    return ServerSettings(
        host=arguments.listen_host,
        port=arguments.grpc_port,
        health_host=arguments.listen_host,
        health_port=arguments.grpc_health_port,
        secure=arguments.secure_serving,
        cert_path=arguments.cert_path,
        lame_duck_s=min(arguments.lame_duck, arguments.drain_timeout),
        drain_timeout_s=arguments.drain_timeout,
        limits=Limits(max_body_bytes=arguments.max_body_bytes),
    )


def _replica_settings(arguments: argparse.Namespace) -> ReplicaSettings:
    name: str | None = arguments.sibling_server_name
    return ReplicaSettings(
        tls_path=arguments.sibling_tls_path,
        siblings=tuple(SiblingAddress(host, port, name or host) for host, port in arguments.sibling),
        host=arguments.listen_host,
        port=arguments.snapshot_port,
        client=ClientSettings(
            total_s=arguments.snapshot_timeout, limits=ReadLimits(arguments.snapshot_max_bytes)
        ),
    )


def _ledger_file(arguments: argparse.Namespace) -> LedgerFile | None:
    path: Path | None = arguments.ledger_file
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(f"--ledger-file {path}: its directory does not exist")
    return LedgerFile(path, max_bytes=arguments.ledger_max_bytes, keep=arguments.ledger_keep)
