"""Composition root of the picker: builds the parts, joins shells that do not know each other, runs them.

The only place that knows all shells. Order of a stop: unready -> stop accepting -> drain -> cancel.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from epp import key_files
from epp.assembly import build_admission_of, build_orders, build_picker, build_tokeniser
from epp.config import EppConfig, load_config, parse_config
from epp.core.errors import ConfigError
from epp.core.index_choice import IndexChoice, choose_index
from epp.debug import build_debug_app
from epp.director import Director
from epp.discovery import EndpointCallbacks, Inputs, build_inputs
from epp.extproc.conformance import ConformanceHandler
from epp.extproc.conversations import RequestHandler
from epp.extproc.server import ExtProcServer
from epp.flow.controller import FlowController
from epp.kvevents.packed_codec import choose_decoder
from epp.leases.choice import HighAvailability
from epp.membership import Membership
from epp.reload import ConfigReload
from epp.replicas import Replicas
from epp.request_terms import RequestTerms
from epp.settings import (
    check_ready_fd,
    ha_mode,
    ledger_file,
    metrics_page,
    metrics_tls,
    replica_settings,
    server_settings,
    span_exporter,
    trusted_salt,
)
from epp.telemetry.build_info import expose_build
from epp.telemetry.config_reload import ConfigCollector
from epp.telemetry.kv_events import KvEventsCollector
from epp.telemetry.ledger import DecisionLedger
from epp.telemetry.logs import setup_logging
from epp.telemetry.metrics import PickerMetrics, PoolCollector, StreamCollector
from epp.telemetry.pool_gauges import PoolGauges
from epp.telemetry.prefetch_metrics import PrefetchCollector
from epp.telemetry.pull_metrics import PullMetrics
from epp.telemetry.replicas import ReplicaCollector
from epp.telemetry.request_metrics import DegradedCollector
from epp.telemetry.scrapes import ScrapeCollector
from epp.telemetry.snapshots import SnapshotCollector
from epp.telemetry.spans import SpanCollector
from epp.telemetry.tokeniser_metrics import TokeniserCollector
from epp.thresholds.in_force import ThresholdState
from sidecar.pages import Pages
from sidecar.pool_watch.metrics import WatchCollector

log = logging.getLogger(__name__)

# The event loop waits at most this long for a thread that runs Python (chat templates do, for milliseconds)
SWITCH_INTERVAL_S = 0.001
# Cycles are rare here (a request leaves a few); looking every 700 objects took a tenth of the CPU time
GC_THRESHOLDS = (10_000, 20, 20)


def serve(arguments: argparse.Namespace) -> int:
    """Run the picker until SIGTERM or SIGINT.

    Raises:
        ConfigError: a configuration that must not start, or a port that is taken.
    """
    try:
        setup_logging(arguments.log_level)
    except ValueError as error:
        raise ConfigError(f"--log-level: {error}") from error
    if arguments.config_file is not None:
        config = load_config(arguments.config_file)
    else:
        config = parse_config(arguments.config_text, "--config-text")
    for note in config.notes:
        log.warning("%s", note)
    check_ready_fd(arguments.ready_fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # one text a call: a thread pool inside the tokenizer would only be woken for nothing
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
    replicas = Replicas(replica_settings(arguments))
    seed = await replicas.take_seed(key_files.index_seed(arguments.index_seed_file), choice.scheme)
    await _App(arguments, config, choice, seed, replicas).run()


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
        self._replicas = replicas
        self._metrics_port = 0  # until it is bound
        self._decoder = choose_decoder(choice.implementation)
        log.info("decoder of KV events: %s %s", self._decoder.implementation, self._decoder.reason)
        self._picker = build_picker(arguments, config, choice, seed)
        self._registry = CollectorRegistry()
        self._pull_metrics = PullMetrics(self._registry)
        self._membership = Membership(
            self._picker,
            replicas,
            self._pull_metrics,
            page=metrics_page(arguments, config.metrics_source, config.engine_gauges),
            decode=self._decoder.decode,
        )
        self._inputs: Inputs = build_inputs(
            arguments,
            config,
            EndpointCallbacks(self._membership.upsert, self._membership.remove),
            self._picker.sources.set_thresholds,
        )
        self._ledger = DecisionLedger(
            self._picker, self._pull_metrics, self._registry, ledger_file(arguments)
        )
        self._tokeniser = build_tokeniser(arguments, config, self._picker)
        self._admission = build_admission_of(config, self._picker, arguments.pool_name or "", self._registry)
        self._orders = build_orders(arguments, config, self._picker)
        self._membership.on_room = self._admission.wake
        self._exporter = span_exporter(arguments)
        self._director = self._build_director()
        self._reload = ConfigReload(
            arguments.config_file or Path(), config, lambda new: self._picker.apply(new.settings)
        )
        self._ha = HighAvailability(
            ha_mode(arguments),
            arguments.ha_lease_name,
            self._picker.sources.set_share,
            namespace=arguments.pool_namespace,
        )
        self._leaving: asyncio.Task[None] | None = None
        self._server = self._build_server()
        self._expose(choice)
        replicas.serve_from(self._picker, seed, choice.scheme, self._membership.events_address)

    def _build_director(self) -> Director:
        return Director(
            self._picker,
            self._tokeniser,
            PickerMetrics(self._registry),
            routing_key=key_files.routing_key(self._arguments.routing_key_file),
            admission=self._admission,
            terms=RequestTerms(self._inputs.objectives),
            trusted_salt=trusted_salt(self._arguments),
            tracer=None if self._exporter is None else self._exporter.tracer(),
        )

    def _build_server(self) -> ExtProcServer:
        handler: RequestHandler = self._director
        if self._arguments.conformance_headers:
            handler = ConformanceHandler(self._director)
        return ExtProcServer(
            handler,
            ready=lambda: self._inputs.ready() and self._ha.ready(),
            settings=server_settings(self._arguments),
        )

    def _expose(self, choice: IndexChoice) -> None:
        """Everything that `/metrics` reads when it is asked."""
        arguments, replicas = self._arguments, self._replicas
        if self._tokeniser is not None:
            self._registry.register(TokeniserCollector(self._tokeniser))
        self._registry.register(StreamCollector(lambda: self._server.stats))
        self._registry.register(DegradedCollector(lambda: self._server.stats.degraded))
        self._registry.register(
            WatchCollector(lambda: (*self._inputs.watches, *self._ha.statuses), time.monotonic)
        )
        self._registry.register(ScrapeCollector(self._membership.scraper))
        self._registry.register(PoolGauges(self._picker, arguments.pool_name or "default"))
        self._registry.register(PoolCollector(self._picker, self._threshold_state, self._membership.refusals))
        expose_build(self._registry, choice.implementation)
        self._registry.register(SpanCollector(self._exporter))
        self._registry.register(SnapshotCollector(replicas.facts))
        self._registry.register(ReplicaCollector(lambda: self._ha.facts))
        self._registry.register(ConfigCollector(self._config_facts))
        self._registry.register(PrefetchCollector(self._orders))
        self._registry.register(KvEventsCollector(self._picker, self._membership.events))

    def _threshold_state(self) -> ThresholdState:
        return self._inputs.thresholds.state

    def _config_facts(self) -> tuple[int, bool]:
        state = self._reload.state
        return state.generation, state.rejected is not None

    def _config_json(self) -> dict[str, Any]:
        """The configuration in force, as `kvpull config explain --json` has it."""
        state = self._reload.state
        body = state.config.explanation.as_json() if state.config.explanation else {}
        return {"generation": state.generation, "rejected": state.rejected, **body}

    # --- life -------------------------------------------------------------------------------------
    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        await self._inputs.open()
        await self._ha.open()
        pages = await self._start_debug()
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
            if self._leaving is not None:
                await self._leaving
            await self._ha.close()
            await self._inputs.close()
            await pages.close()
            if self._tokeniser is not None:
                await self._tokeniser.aclose()
        log.info("stopped")

    def _request_stop(self) -> None:
        """Drain; where another replica waits to lead, let it."""
        self._server.request_stop()
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._ha.on_drain())

    def _background(self) -> list[Awaitable[None]]:
        own = (self._inputs, self._ledger, self._ha, self._reload)
        running = [*self._membership.running(), *(part.run() for part in own)]
        if isinstance(self._admission, FlowController):
            running.append(self._admission.run())
        if self._orders is not None:
            running.append(self._orders.run())
        if self._replicas.server is not None:
            running.append(self._replicas.server.run())
        if self._exporter is not None:
            running.append(self._exporter.run())
        return running

    async def _serve_with(self, background: list[asyncio.Task[None]]) -> None:
        """Serve until asked to stop; a component that ends early is a fault and ends the picker."""
        await self._server.start()
        gc.collect()
        gc.freeze()  # modules and settings stay: nobody has to walk them again
        gc.set_threshold(*GC_THRESHOLDS)
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

    async def _start_debug(self) -> Pages:
        arguments = self._arguments
        app = build_debug_app(
            self._picker,
            self._registry,
            self._threshold_state,
            key_files.debug_token(arguments.debug_token_file),
            token_ids=self._director.token_ids,
            ports=self._membership.event_ports,
            config=self._config_json,
        )
        try:
            pages = await Pages.start(
                app, arguments.listen_host, arguments.metrics_port, metrics_tls(arguments)
            )
        except OSError as error:
            raise ConfigError(
                f"metrics port {arguments.listen_host}:{arguments.metrics_port}: {error.strerror}"
            ) from error
        self._metrics_port = pages.port
        return pages

    async def _report_ready(self) -> None:
        await self._inputs.wait_ready()
        spoken = "TLS" if self._arguments.secure_serving else "plain text"
        log.info(
            "serving ext-proc on port %d in %s: the gateway has to speak that, too", self._server.port, spoken
        )
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
