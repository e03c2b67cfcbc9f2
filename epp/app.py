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
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge

from engine_plugin.identity import EndpointId
from epp.config import EXACT_TOKENS_NEEDED, EppConfig, load_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.hashing import INDEX_SEED_BYTES
from epp.core.index_choice import choose_index
from epp.debug import build_debug_app
from epp.director import Director
from epp.endpoints.file_source import FileSource, endpoint_of, scrape_target_of
from epp.endpoints.scraper import MetricsScraper
from epp.extproc.server import ExtProcServer, ServerSettings
from epp.extproc.service import Limits
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from epp.request.back_end import TokeniserPlan
from epp.request.render import RenderTokeniser
from epp.request.tokenise import LocalTokeniser
from epp.telemetry.logs import setup_logging
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector, StreamCollector
from epp.telemetry.request_metrics import DegradedCollector
from epp.telemetry.tokeniser_metrics import TokeniserCollector
from epp.thresholds.directory_source import DirectoryThresholds, ThresholdState
from sidecar.endpoint_file import EndpointRow
from sidecar.routing_auth import load_routing_key

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
    endpoints: FileSource
    thresholds: DirectoryThresholds | None


class _App:
    def __init__(self, arguments: argparse.Namespace, config: EppConfig) -> None:
        self._arguments = arguments
        staleness_s = arguments.metrics_staleness_threshold
        choice = choose_index()
        log.info("prefix index: %s %s", choice.implementation, choice.reason)
        index = choice.make(_index_seed(arguments.index_seed_file))
        self._picker = EndpointPicker(
            replace(config.settings, metrics_staleness_s=staleness_s), CacheView(index)
        )
        self._refusals = PeerRefusals()
        self._parts = self._build_parts(config)
        self._registry = CollectorRegistry()
        self._tokeniser = self._build_tokeniser(config)
        self._director = Director(
            self._picker,
            self._tokeniser,
            PickerMetrics(self._registry),
            routing_key=_routing_key(arguments.routing_key_file),
        )
        self._server = ExtProcServer(
            self._director, ready=self._parts.endpoints.loaded.is_set, settings=_server_settings(arguments)
        )
        if self._tokeniser is not None:
            self._registry.register(TokeniserCollector(self._tokeniser))
        self._registry.register(StreamCollector(self._open_streams))
        self._registry.register(DegradedCollector(lambda: self._server.stats.degraded))
        self._registry.register(PoolCollector(self._picker, self._threshold_state, self._refusals))
        implementation = Gauge(
            "kvpull_epp_index_info", "1: the index in use.", ["implementation"], registry=self._registry
        )
        implementation.labels(choice.implementation).set(1)

    def _build_parts(self, config: EppConfig) -> _Parts:
        arguments = self._arguments
        path = arguments.endpoints_file or config.discovery_path
        if path is None:
            raise ConfigError("no endpoints: give --endpoints-file, or file-discovery in dataLayer.discovery")
        scraper = MetricsScraper(
            on_metrics=self._picker.update_metrics,
            on_page=lambda endpoint, page: self._refusals.update(endpoint, page.peer_refused),
            clock=time.monotonic,
            rng=random.Random(),
            interval_s=arguments.refresh_metrics_interval,
        )
        thresholds = None
        if arguments.thresholds_dir is not None:
            thresholds = DirectoryThresholds(arguments.thresholds_dir, self._picker.set_thresholds)
        return _Parts(
            scraper=scraper,
            events=KvEventsManager(self._picker.cache),
            endpoints=FileSource(Path(path), on_upsert=self._upsert, on_remove=self._remove),
            thresholds=thresholds,
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

    # --- the pool changes -------------------------------------------------------------------------
    def _upsert(self, row: EndpointRow) -> None:
        source = EventSource(row.host, row.events_port, row.replay_port or None)
        if self._picker.upsert_endpoint(endpoint_of(row), has_replay=source.has_replay):
            self._parts.events.remove_endpoint(row.id)  # a fresh view needs a fresh subscription
        self._parts.events.add_endpoint(row.id, source)
        self._parts.scraper.upsert(scrape_target_of(row))
        log.info("endpoint %s at %s", row.id, row.serving)

    def _remove(self, endpoint: EndpointId) -> None:
        self._parts.scraper.remove(endpoint)
        self._parts.events.remove_endpoint(endpoint)
        self._picker.remove_endpoint(endpoint)
        self._refusals.forget(endpoint)
        log.info("endpoint %s has left", endpoint)

    def _threshold_state(self) -> ThresholdState:
        thresholds = self._parts.thresholds
        return thresholds.state if thresholds is not None else ThresholdState()

    def _open_streams(self) -> dict[str, int]:
        stats = self._server.stats
        return {"streams": stats.streams_open, "deciding": stats.deciding, "decisions": stats.decisions_open}

    # --- life -------------------------------------------------------------------------------------
    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._server.request_stop)
        web_runner = await self._start_debug()
        background = [asyncio.create_task(_forever(part)) for part in self._background()]
        try:
            await self._serve_with(background)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await web_runner.cleanup()
            if self._tokeniser is not None:
                await self._tokeniser.aclose()
        log.info("stopped")

    def _background(self) -> list[Awaitable[None]]:
        parts = self._parts
        running: list[Awaitable[None]] = [parts.scraper.run(), parts.events.run(), parts.endpoints.run()]
        if parts.thresholds is not None:
            running.append(parts.thresholds.run())
        return running

    async def _serve_with(self, background: list[asyncio.Task[None]]) -> None:
        """Serve until asked to stop; a component that ends early is a fault and ends the picker."""
        if self._parts.thresholds is not None:
            await self._parts.thresholds.refresh()
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
        await self._parts.endpoints.loaded.wait()
        log.info("serving ext-proc on port %d", self._server.port)
        if self._arguments.ready_fd is not None:
            line = {"ready": True, "grpc_port": self._server.port, "health_port": self._server.health_port}
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
