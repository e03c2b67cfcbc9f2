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
import secrets
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge

from engine_plugin.identity import EndpointId
from epp.config import EppConfig, load_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.hashing import INDEX_SEED_BYTES
from epp.core.index_choice import choose_index
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
from epp.reports.subscriber import ReportSubscriber
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.tokenise import LocalTokeniser
from epp.telemetry.ledger import DecisionLedger
from epp.telemetry.ledger_file import LedgerFile
from epp.telemetry.logs import setup_logging
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector, StreamCollector
from epp.telemetry.pull_metrics import PullMetrics
from epp.thresholds.in_force import ThresholdState
from sidecar.endpoint_file import EndpointRow
from sidecar.pool_watch.metrics import WatchCollector
from sidecar.routing_auth import load_routing_key

log = logging.getLogger(__name__)


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
    try:
        uvloop.run(_App(arguments, config).run())
    except ConfigError:
        raise
    except Exception:
        log.exception("the picker ended by a fault of its own")
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class _Parts:
    """Components with a `run()` of their own, besides the ext-proc server."""

    scraper: MetricsScraper
    events: KvEventsManager
    reports: ReportSubscriber


class _App:
    def __init__(self, arguments: argparse.Namespace, config: EppConfig) -> None:
        self._arguments = arguments
        staleness_s = arguments.metrics_staleness_threshold
        choice = choose_index()
        log.info("prefix index: %s %s", choice.implementation, choice.reason)
        index = choice.make(_index_seed(arguments.index_seed_file))
        self._picker = EndpointPicker(
            replace(
                config.settings, metrics_staleness_s=staleness_s, pull_deadline_s=arguments.pull_deadline
            ),
            CacheView(index),
        )
        self._metrics_port = 0  # once it is bound
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
        self._tokeniser = _tokeniser(arguments.tokenizer or config.tokenizer_path, arguments.tokenizer_budget)
        self._director = Director(
            self._picker,
            self._tokeniser,
            PickerMetrics(self._registry),
            routing_key=_routing_key(arguments.routing_key_file),
        )
        self._server = ExtProcServer(
            self._director, ready=self._inputs.ready, settings=_server_settings(arguments)
        )
        self._registry.register(StreamCollector(self._open_streams))
        self._registry.register(WatchCollector(lambda: self._inputs.watches, time.monotonic))
        self._registry.register(PoolCollector(self._picker, self._threshold_state, self._refusals))
        implementation = Gauge(
            "kvpull_epp_index_info", "1: the index in use.", ["implementation"], registry=self._registry
        )
        implementation.labels(choice.implementation).set(1)

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
            events=KvEventsManager(self._picker.cache),
            reports=ReportSubscriber(self._on_report, lambda _: self._count_report("malformed")),
        )

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
        self._parts.events.add_endpoint(row.id, source)
        self._parts.reports.upsert(row.id, row.host)
        self._parts.scraper.upsert(scrape_target_of(row))
        log.info("endpoint %s at %s%s", row.id, row.serving, " is draining" if draining else "")

    def _remove(self, endpoint: EndpointId) -> None:
        self._parts.scraper.remove(endpoint)
        self._parts.reports.remove(endpoint)
        self._parts.events.remove_endpoint(endpoint)
        self._picker.remove_endpoint(endpoint)
        self._refusals.forget(endpoint)
        log.info("endpoint %s has left", endpoint)

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
        self._metrics_port = int(web_runner.addresses[0][1])
        background = [asyncio.create_task(_forever(part)) for part in self._background()]
        try:
            await self._serve_with(background)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._ledger.aclose()
            await self._inputs.close()
            await web_runner.cleanup()
            if self._tokeniser is not None:
                await self._tokeniser.aclose()
        log.info("stopped")

    def _background(self) -> list[Awaitable[None]]:
        parts = self._parts
        return [
            parts.scraper.run(),
            parts.events.run(),
            self._inputs.run(),
            parts.reports.run(),
            self._ledger.run(),
        ]

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
            self._picker, self._registry, self._threshold_state, _token(arguments.debug_token_file)
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
        return runner

    async def _report_ready(self) -> None:
        await self._inputs.wait_ready()
        log.info("serving ext-proc on port %d", self._server.port)
        if self._arguments.ready_fd is not None:
            ports = {"grpc_port": self._server.port, "health_port": self._server.health_port}
            line = {"ready": True, **ports, "metrics_port": self._metrics_port}
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


def _tokeniser(directory: str | Path | None, budget_s: float) -> LocalTokeniser | None:
    if directory is None:
        log.warning("no tokenizer configured: every request is routed by load, and nothing is pulled")
        return None
    return LocalTokeniser(LocalTokenizer.load(Path(directory)), budget_s=budget_s)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = _read(path, "--debug-token-file").decode("utf-8", "replace").strip()
    if not token:
        raise ConfigError(f"--debug-token-file {path}: is empty")
    return token


def _routing_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return load_routing_key(_read(path, "--routing-key-file"))
    except ValueError as error:
        raise ConfigError(f"--routing-key-file {path}: {error}") from error


def _ledger_file(arguments: argparse.Namespace) -> LedgerFile | None:
    path: Path | None = arguments.ledger_file
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(f"--ledger-file {path}: its directory does not exist")
    return LedgerFile(path, max_bytes=arguments.ledger_max_bytes, keep=arguments.ledger_keep)


def _index_seed(path: Path | None) -> bytes:
    if path is None:
        return secrets.token_bytes(INDEX_SEED_BYTES)
    try:
        seed = bytes.fromhex(_read(path, "--index-seed-file").decode("ascii", "replace").strip())
    except ValueError as error:
        raise ConfigError(f"--index-seed-file {path}: not hex digits") from error
    if len(seed) != INDEX_SEED_BYTES:
        raise ConfigError(f"--index-seed-file {path}: {len(seed)} bytes, {INDEX_SEED_BYTES} are needed")
    return seed
