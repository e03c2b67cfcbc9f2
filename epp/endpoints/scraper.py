"""Keeps every endpoint's metrics fresh: one connection and one task an endpoint, for ever.

A scrape that fails reports *nothing*: what was known ages, and its age is how everybody else sees
the outage. It never turns into "idle". Scrapes of one endpoint never overlap; a hung, endless or
garbage server costs its own endpoint only. It decides nothing about routing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from engine_plugin.identity import EndpointId
from epp.core.types import EndpointMetrics
from epp.endpoints.metrics_parser import MetricsPage, parse_metrics

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S: Final = 0.05  # llm-d-router's --refresh-metrics-interval
DEFAULT_TIMEOUT_S: Final = 1.0
DEFAULT_MAX_PAGE_BYTES: Final = 4 << 20
MAX_BACKOFF_S: Final = 1.0
_JITTER: Final = 0.1  # of the interval, to either side: endpoints drift apart
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Where the page of one endpoint is; `host` is an IP address."""

    id: EndpointId
    host: str
    port: int
    path: str = "/metrics"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"


@dataclass(slots=True)
class ScrapeStats:
    """Counters of one endpoint; `failing` is the stable reason of the last scrape, None if it was good."""

    good: int = 0
    failed: int = 0
    consecutive_failures: int = 0
    failing: str | None = None
    last_good_s: float | None = None


class ScrapeError(Exception):
    """One scrape brought nothing; the argument is a stable reason."""


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
    ) -> None:
        """`clock` is the core's; `on_page` also gets labels and refusal counters of a page;
        `on_failure` hears the stable reason of every scrape that brought nothing."""
        self._on_metrics = on_metrics
        self._on_page = on_page
        self._on_failure = on_failure
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_page_bytes = max_page_bytes
        self._targets: dict[EndpointId, ScrapeTarget] = {}
        self._stats: dict[EndpointId, ScrapeStats] = {}
        self._tasks: dict[EndpointId, asyncio.Task[None]] = {}
        self._running: tuple[asyncio.TaskGroup, aiohttp.ClientSession] | None = None

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
            async with self._session() as session, asyncio.TaskGroup() as group:
                self._running = group, session
                for target in self._targets.values():
                    self._start(target)
                await asyncio.Event().wait()
        finally:
            self._running = None
            self._tasks.clear()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, use_dns_cache=False),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Accept": "text/plain"},
            trust_env=False,
        )

    def _start(self, target: ScrapeTarget) -> None:
        if self._running is not None:
            group, session = self._running
            task = group.create_task(self._scrape_forever(session, target), name=f"scrape {target.id}")
            self._tasks[target.id] = task

    async def _scrape_forever(self, session: aiohttp.ClientSession, target: ScrapeTarget) -> None:
        stats = self._stats[target.id]
        await asyncio.sleep(self._rng.uniform(0.0, min(self._interval_s, MAX_BACKOFF_S)))
        while True:
            try:
                page = await self._scrape(session, target)
                self._report(target, page)
            except ScrapeError as error:
                self._note_failure(target, stats, str(error))
            except Exception:  # noqa: BLE001  # task guard: must not end the scraping of all others
                _log.exception("scraping endpoint %s met a fault of the picker", target.id)
                self._note_failure(target, stats, "internal")
            else:
                self._note_success(target, stats)
            await asyncio.sleep(self._pause_s(stats.consecutive_failures))

    async def _scrape(self, session: aiohttp.ClientSession, target: ScrapeTarget) -> MetricsPage:
        """One page. Its age counts from before the request: never younger than it is."""
        asked_at_s = self._clock()
        try:
            async with session.get(target.url, allow_redirects=False) as response:
                if response.status != 200:
                    raise ScrapeError(f"status_{response.status // 100}xx")
                page = await self._read_bounded(response)
        except TimeoutError:
            raise ScrapeError("timeout") from None
        except aiohttp.ClientConnectorError:
            raise ScrapeError("connect") from None
        except (aiohttp.ClientError, ValueError, OSError):
            raise ScrapeError("protocol") from None
        return parse_metrics(page, scraped_at_s=asked_at_s, rank=target.id.rank)

    async def _read_bounded(self, response: aiohttp.ClientResponse) -> bytes:
        page = bytearray()
        async for part in response.content.iter_chunked(_READ_BYTES):
            page += part
            if len(page) > self._max_page_bytes:
                response.close()
                raise ScrapeError("page_size")
        return bytes(page)

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
        stats.consecutive_failures = 0
        stats.failing = None
        stats.last_good_s = self._clock()

    def _note_failure(self, target: ScrapeTarget, stats: ScrapeStats, reason: str) -> None:
        if stats.failing is None:
            _log.warning("metrics of endpoint %s (%s) cannot be read: %s", target.id, target.url, reason)
        stats.failed += 1
        stats.consecutive_failures += 1
        stats.failing = reason
        if self._on_failure is not None:
            self._on_failure(target.id, reason)
