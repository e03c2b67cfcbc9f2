"""Endpoints that come, go and speak: every shell and the picker hear of it, in one order.

Part of the composition root. Must not decide anything: it passes on.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.types import EndpointMetrics, PullReport
from epp.endpoints.file_source import endpoint_of, scrape_target_of
from epp.endpoints.metrics_parser import MetricsPage
from epp.endpoints.scraper import MetricsPageSettings, MetricsScraper
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from epp.kvevents.packed_codec import Decode
from epp.replicas import Replicas
from epp.reports.subscriber import ReportSubscriber
from epp.telemetry.metrics import PeerRefusals
from epp.telemetry.pull_metrics import PullMetrics
from sidecar.endpoint_file import EndpointRow

log = logging.getLogger(__name__)


class Membership:
    """Builds the shells that follow endpoints and joins them with the picker.

    Args:
        page: where the engines' metrics are, and how often they are read.
        decode: turns a KV-event message into events (`choose_decoder`).
    """

    def __init__(
        self,
        picker: EndpointPicker,
        replicas: Replicas,
        pull_metrics: PullMetrics,
        *,
        page: MetricsPageSettings,
        decode: Decode,
    ) -> None:
        self._picker = picker
        self._replicas = replicas
        self._pull_metrics = pull_metrics
        self.refusals = PeerRefusals()
        self.on_room: Callable[[], None] = lambda: None  # metrics or endpoints have come
        self._page = page
        self.scraper = MetricsScraper(
            on_metrics=self._on_metrics,
            on_page=self._on_page,
            clock=time.monotonic,
            rng=random.Random(),
            interval_s=page.interval_s,
            gauges=page.gauges,
        )
        self.events = KvEventsManager(picker.cache, decode=decode)
        self._reports = ReportSubscriber(self._on_report, lambda _: self._count_report("malformed"))

    def running(self) -> list[Awaitable[None]]:
        """The shells' endless work, to be awaited once."""
        return [self.scraper.run(), self.events.run(), self._reports.run()]

    # --- what engines say -------------------------------------------------------------------------
    def _on_metrics(self, endpoint: EndpointId, metrics: EndpointMetrics) -> None:
        self._picker.update_metrics(endpoint, metrics)
        self.on_room()

    def _on_page(self, endpoint: EndpointId, page: MetricsPage) -> None:
        self.refusals.update(endpoint, page.peer_refused)
        self._picker.update_refusals(endpoint, page.peer_refused, time.monotonic())
        self._reports.announce(endpoint, page.info_labels.get("reports_port", ""))

    def _on_report(self, endpoint: EndpointId, report: PullReport) -> None:
        self._count_report("joined" if self._picker.pull_finished(report, endpoint) else "unmatched")

    def _count_report(self, result: str) -> None:
        self._pull_metrics.reports.labels(result).inc()

    # --- the pool changes -------------------------------------------------------------------------
    def upsert(self, row: EndpointRow, draining: bool = False) -> None:
        """A new endpoint, or new facts about one."""
        source = EventSource(row.host, row.events_port, row.replay_port or None)
        endpoint = replace(endpoint_of(row), draining=draining)
        if self._picker.upsert_endpoint(endpoint, has_replay=source.has_replay):
            self.events.remove_endpoint(row.id)  # a fresh view needs a fresh subscription
            subscribe = partial(self.events.add_endpoint, row.id, source)
            self._replicas.offer(self._picker, row.id, source.host, source.events_port, subscribe)
        elif not self._replicas.is_adopting(row.id):
            self.events.add_endpoint(row.id, source)
        self._reports.upsert(row.id, row.host)
        self.scraper.upsert(scrape_target_of(row, self._page))
        self.on_room()
        log.info("endpoint %s at %s%s", row.id, row.serving, " is draining" if draining else "")

    def remove(self, endpoint: EndpointId) -> None:
        """An endpoint has left: nothing of it stays."""
        self.scraper.remove(endpoint)
        self._reports.remove(endpoint)
        self.events.remove_endpoint(endpoint)
        self._replicas.withdraw(endpoint)
        self._picker.remove_endpoint(endpoint)
        self.refusals.forget(endpoint)
        log.info("endpoint %s has left", endpoint)

    def events_address(self, endpoint: EndpointId) -> tuple[str, int] | None:
        """Where its engine publishes KV events; None: not known."""
        source = self.events.source(endpoint)
        return None if source is None else (source.host, source.events_port)

    def event_ports(self, endpoint: EndpointId) -> dict[str, int | None]:
        """For `/debug`: empty where it is not known."""
        source = self.events.source(endpoint)
        if source is None:
            return {}
        return {"events_port": source.events_port, "replay_port": source.replay_port}
