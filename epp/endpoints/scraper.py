"""Keeps every endpoint's metrics fresh: one connection and one task an endpoint, for ever.

An interval is a wish: where there is more to do than `turns` allows, all of them stretch (`stretch` says how
much).
A scrape that fails reports *nothing*: what was known ages, and its age is how everybody else sees
the outage. It never turns into "idle". Scrapes of one endpoint never overlap; a hung, endless or
garbage server costs its own endpoint only. It decides nothing about routing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from engine_plugin.identity import EndpointId
from epp.core.types import EndpointMetrics
from epp.endpoints.metrics_parser import MetricsPage, parse_metrics
from epp.endpoints.page_client import PageAddress, PageClient
from epp.endpoints.page_client import ScrapeError as ScrapeError
from epp.endpoints.turns import Turns
from epp.plugins.metric_specs import NO_MORE_GAUGES, EngineGauges

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S: Final = 0.05  # llm-d-router's --refresh-metrics-interval
DEFAULT_TIMEOUT_S: Final = 1.0
DEFAULT_MAX_PAGE_BYTES: Final = 4 << 20
MAX_BACKOFF_S: Final = 1.0
_JITTER: Final = 0.1  # of the interval, to either side: endpoints drift apart
_MEMORY: Final = 0.01  # weight of the newest interval in `stretch`
CLIENT_OVERHEAD_S: Final = 0.0002  # a scrape's share of loop and kernel, which nothing here can measure


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Where the page of one endpoint is; `host` is an IP address."""

    id: EndpointId
    host: str
    port: int
    path: str = "/metrics"
    tls: ssl.SSLContext | None = None  # None: plain HTTP

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class MetricsPageSettings:
    """Of every engine's page. `tls` None: plain HTTP."""

    path: str = "/metrics"
    tls: ssl.SSLContext | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    port: int | None = None  # None: each endpoint's own
    gauges: EngineGauges = NO_MORE_GAUGES  # of engines other than vLLM and SGLang


@dataclass(slots=True)
class ScrapeStats:
    """Counters of one endpoint; `failing` is the stable reason of the last scrape, None if it was good."""

    good: int = 0
    failed: int = 0
    consecutive_failures: int = 0
    failing: str | None = None
    last_good_s: float | None = None


class MetricsScraper:
    """Scrapes the endpoints it is told of. `upsert`, `remove` and `run` belong to one event loop."""

    def __init__(
        self,
        *,
        on_metrics: Callable[[EndpointId, EndpointMetrics], None],
        clock: Callable[[], float],
        rng: random.Random,
        on_page: Callable[[EndpointId, MetricsPage], None] | None = None,
        on_failure: Callable[[EndpointId, str], None] | None = None,
        interval_s: float = DEFAULT_INTERVAL_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_page_bytes: int = DEFAULT_MAX_PAGE_BYTES,
        gauges: EngineGauges = NO_MORE_GAUGES,
    ) -> None:
        """`gauges`: names of engines other than vLLM and SGLang. `clock` is the core's;
        `on_page` also gets labels and refusal counters of a page;
        `on_failure` hears the stable reason of every scrape that brought nothing."""
        self._on_metrics = on_metrics
        self._on_page = on_page
        self._on_failure = on_failure
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_page_bytes = max_page_bytes
        self._gauges = gauges
        self._targets: dict[EndpointId, ScrapeTarget] = {}
        self._stats: dict[EndpointId, ScrapeStats] = {}
        self._tasks: dict[EndpointId, asyncio.Task[None]] = {}
        self._running: asyncio.TaskGroup | None = None
        self._turns = Turns()
        self.stretch = 1.0  # intervals as they are, in times of what was asked for; smoothed over the pool
        self.failures: Counter[str] = Counter()  # by reason, of endpoints that have left, too
        self.pages = 0

    @property
    def stats(self) -> Mapping[EndpointId, ScrapeStats]:
        return self._stats

    def upsert(self, target: ScrapeTarget) -> None:
        """Scrape `target` from now on. The same target again changes nothing; another address of
        the same endpoint replaces the old one, and the old one reports no more."""
        if self._targets.get(target.id) == target:
            return
        self.remove(target.id)
        self._targets[target.id] = target
        self._stats[target.id] = ScrapeStats()
        self._start(target)

    def remove(self, endpoint_id: EndpointId) -> None:
        """Stop scraping; nothing of this endpoint is reported after this call."""
        self._targets.pop(endpoint_id, None)
        self._stats.pop(endpoint_id, None)
        task = self._tasks.pop(endpoint_id, None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        """Scrape until cancelled; every task and connection is gone when this returns."""
        if self._running is not None:
            raise RuntimeError("the scraper runs already")
        try:
            async with asyncio.TaskGroup() as group:
                self._running = group
                for target in self._targets.values():
                    self._start(target)
                await asyncio.Event().wait()
        finally:
            self._running = None
            self._tasks.clear()

    def _start(self, target: ScrapeTarget) -> None:
        if self._running is not None:
            task = self._running.create_task(self._scrape_forever(target), name=f"scrape {target.id}")
            self._tasks[target.id] = task

    async def _scrape_forever(self, target: ScrapeTarget) -> None:
        address = PageAddress(target.host, target.port, target.path, target.tls)
        client = PageClient(address, timeout_s=self._timeout_s, max_page_bytes=self._max_page_bytes)
        stats = self._stats[target.id]
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._rng.uniform(0.0, min(self._interval_s, MAX_BACKOFF_S)))
        try:
            while True:
                due_s = loop.time() + self._pause_s(stats.consecutive_failures)
                async with self._turns.turn(suspect=stats.failing is not None):
                    await self._scrape_once(client, target, stats)
                left_s = due_s - loop.time()
                if stats.failing is None:
                    self._note_interval(self._interval_s + max(0.0, -left_s))
                await asyncio.sleep(max(0.0, left_s))
        finally:
            client.close()

    async def _scrape_once(self, client: PageClient, target: ScrapeTarget, stats: ScrapeStats) -> None:
        asked_at_s = self._clock()  # its age counts from before the request: never younger than it is
        busy_s = client.busy_s
        try:
            body = await client.get()
            started_s = time.thread_time()
            page = parse_metrics(body, scraped_at_s=asked_at_s, rank=target.id.rank, more=self._gauges)
            self._report(target, page)
            busy_s -= time.thread_time() - started_s
        except ScrapeError as error:
            self._note_failure(target, stats, str(error))
        except Exception:  # noqa: BLE001  # task guard: must not end the scraping of all others
            _log.exception("scraping endpoint %s met a fault of the picker", target.id)
            self._note_failure(target, stats, "internal")
        else:
            self._note_success(target, stats)
            self._turns.spent(client.busy_s - busy_s + CLIENT_OVERHEAD_S)

    def _note_interval(self, seconds: float) -> None:
        self.stretch += (seconds / self._interval_s - self.stretch) * _MEMORY

    def _report(self, target: ScrapeTarget, page: MetricsPage) -> None:
        self._on_metrics(target.id, page.metrics)
        if self._on_page is not None:
            self._on_page(target.id, page)

    def _pause_s(self, consecutive_failures: int) -> float:
        """The interval with jitter, doubled for every failure in a row up to `MAX_BACKOFF_S`."""
        pause_s = self._interval_s
        if consecutive_failures:
            doubled_s = self._interval_s * 2.0 ** min(consecutive_failures, 16)
            pause_s = max(self._interval_s, min(doubled_s, MAX_BACKOFF_S))
        return pause_s * self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)

    def _note_success(self, target: ScrapeTarget, stats: ScrapeStats) -> None:
        if stats.failing is not None:
            _log.info("metrics of endpoint %s are back", target.id)
        stats.good += 1
        self.pages += 1
        stats.consecutive_failures = 0
        stats.failing = None
        stats.last_good_s = self._clock()

    def _note_failure(self, target: ScrapeTarget, stats: ScrapeStats, reason: str) -> None:
        if stats.failing is None:
            _log.warning("metrics of endpoint %s (%s) cannot be read: %s", target.id, target.url, reason)
        stats.failed += 1
        self.failures[reason] += 1
        stats.consecutive_failures += 1
        stats.failing = reason
        if self._on_failure is not None:
            self._on_failure(target.id, reason)
