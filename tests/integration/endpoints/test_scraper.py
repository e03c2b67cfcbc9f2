"""The scraper against real servers: good, hung, endless, garbage, dead, and back again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from engine_plugin.identity import EndpointId
from epp.core.types import EndpointMetrics
from epp.endpoints.metrics_parser import MetricsPage
from epp.endpoints.scraper import MetricsScraper, ScrapeTarget

from .conftest import BOUND_S, Collector, metrics_server, running

A, B = EndpointId("engine-a"), EndpointId("engine-b")
Report = tuple[EndpointId, EndpointMetrics]
Failure = tuple[EndpointId, str]


def page(waiting: float) -> str:
    return f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running 1.0\n"


class Clock:
    """Every look is one second later, so that order can be read from the times."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._ticks))


def scraper_for(
    reports: Collector[Report],
    *,
    clock: Callable[[], float] | None = None,
    on_page: Callable[[EndpointId, MetricsPage], None] | None = None,
    failures: Collector[Failure] | None = None,
    timeout_s: float = BOUND_S,
    max_page_bytes: int = 1 << 20,
) -> MetricsScraper:
    return MetricsScraper(
        on_metrics=lambda endpoint_id, metrics: reports.add((endpoint_id, metrics)),
        on_page=on_page,
        on_failure=None if failures is None else lambda *failure: failures.add(failure),
        clock=clock or Clock(),
        rng=random.Random(1),
        interval_s=0.005,
        timeout_s=timeout_s,
        max_page_bytes=max_page_bytes,
    )


async def test_values_arrive_over_one_connection_without_overlap() -> None:
    reports: Collector[Report] = Collector()
    connections: set[object] = set()
    inside = worst = 0

    async def serve(request: web.Request) -> web.Response:
        nonlocal inside, worst
        connections.add(request.transport)
        inside += 1
        worst = max(worst, inside)
        await asyncio.sleep(0.01)  # longer than the interval
        inside -= 1
        return web.Response(text=page(3))

    async with metrics_server(serve) as port:
        scraper = scraper_for(reports)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            items = await reports.until(lambda items: len(items) >= 10)
    assert {endpoint_id for endpoint_id, _ in items} == {A}
    assert {metrics.waiting_requests for _, metrics in items} == {3.0}
    assert len(connections) == 1
    assert worst == 1


async def test_the_age_counts_from_before_the_request() -> None:
    reports: Collector[Report] = Collector()
    clock = Clock()
    served_at_s: list[float] = []

    async def serve(_: web.Request) -> web.Response:
        served_at_s.append(clock())
        return web.Response(text=page(0))

    async with metrics_server(serve) as port:
        scraper = scraper_for(reports, clock=clock)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            items = await reports.until(lambda items: len(items) >= 3)
    for (_, metrics), served in zip(items, served_at_s, strict=False):
        assert metrics.scraped_at_s is not None
        assert metrics.scraped_at_s < served


async def test_rank_and_plugin_facts_reach_the_caller() -> None:
    reports: Collector[Report] = Collector()
    pages: list[MetricsPage] = []
    text = (
        'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 8\n'
        'kvpull_peer_refused_total{peer="p",reason="seed_fp"} 2\n'
    )

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async with metrics_server(serve) as port:
        scraper = scraper_for(reports, on_page=lambda _, page: pages.append(page))
        scraper.upsert(ScrapeTarget(EndpointId("pod", 1), "127.0.0.1", port))
        async with running(scraper.run()):
            items = await reports.until(lambda items: len(items) >= 2)
    assert items[0] == (EndpointId("pod", 1), items[0][1])
    assert items[0][1].waiting_requests == 8.0
    assert pages[0].peer_refused == {("p", "seed_fp"): 2.0}


async def test_a_hung_server_costs_its_own_endpoint_only() -> None:
    """Nothing is reported for it, so its metrics age; the other one goes on."""
    failures: Collector[Failure] = Collector()
    reports: Collector[Report] = Collector()
    hung = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        hung.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=page(1))

    async with metrics_server(hang) as bad_port, metrics_server(serve) as good_port:
        scraper = scraper_for(reports, failures=failures, timeout_s=0.05)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", bad_port))
        scraper.upsert(ScrapeTarget(B, "127.0.0.1", good_port))
        async with running(scraper.run()):
            await asyncio.wait_for(hung.wait(), BOUND_S)
            assert (await failures.until(lambda items: len(items) >= 2))[:2] == [(A, "timeout")] * 2
            await reports.until(lambda items: len(items) >= 5)
            assert scraper.stats[A].failing == "timeout"
    assert {endpoint_id for endpoint_id, _ in reports.items} == {B}


async def test_an_endless_page_is_cut_off() -> None:
    failures: Collector[Failure] = Collector()
    reports: Collector[Report] = Collector()
    sent_bytes = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"vllm:num_requests_waiting 0\n" * 100)
                sent_bytes += 2800
        return response

    async with metrics_server(endless) as port:
        scraper = scraper_for(reports, failures=failures, max_page_bytes=100_000)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            assert (await failures.until(lambda items: len(items) >= 1))[0] == (A, "page_size")
    assert reports.items == []
    assert sent_bytes < 64 << 20


async def test_garbage_with_status_200_is_unknown_not_idle() -> None:
    reports: Collector[Report] = Collector()

    async def garbage(_: web.Request) -> web.Response:
        return web.Response(body=bytes(range(256)) * 100)

    async with metrics_server(garbage) as port:
        scraper = scraper_for(reports)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            ((_, metrics), *_) = await reports.until(lambda items: len(items) >= 1)
    assert metrics == EndpointMetrics(scraped_at_s=metrics.scraped_at_s)


async def test_bytes_that_are_no_http() -> None:
    failures: Collector[Failure] = Collector()
    reports: Collector[Report] = Collector()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"\x00\xff no http at all\r\n\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        scraper = scraper_for(reports, failures=failures)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", server.sockets[0].getsockname()[1]))
        async with running(scraper.run()):
            assert (await failures.until(lambda items: len(items) >= 2))[:2] == [(A, "protocol")] * 2
    assert reports.items == []


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "status_5xx"), (302, "status_3xx"), (404, "status_4xx")]
)
async def test_other_answers_report_nothing(status: int, reason: str) -> None:
    failures: Collector[Failure] = Collector()
    reports: Collector[Report] = Collector()

    async def serve(_: web.Request) -> web.Response:
        return web.Response(status=status, text=page(0), headers={"Location": "/metrics"})

    async with metrics_server(serve) as port:
        scraper = scraper_for(reports, failures=failures)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            assert (await failures.until(lambda items: len(items) >= 1))[0] == (A, reason)
    assert reports.items == []


async def test_an_engine_that_comes_back_is_seen_again(caplog: pytest.LogCaptureFixture) -> None:
    """S-D15: no restart needed. The outage is logged once, not at every scrape."""
    failures: Collector[Failure] = Collector()
    reports: Collector[Report] = Collector()

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=page(2))

    scraper = scraper_for(reports, failures=failures)
    with caplog.at_level(logging.INFO, logger="epp.endpoints.scraper"):
        async with metrics_server(serve) as port:
            scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
            task = asyncio.create_task(scraper.run())
            await reports.until(lambda items: len(items) >= 1)
        await failures.until(lambda items: len(items) >= 3)
        seen = len(reports.items)
        async with metrics_server(serve, port=port):
            await reports.until(lambda items: len(items) > seen)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    levels = [record.levelname for record in caplog.records if "engine-a/0" in record.getMessage()]
    assert levels == ["WARNING", "INFO"]


async def test_endpoints_come_move_and_go_at_run_time() -> None:
    reports: Collector[Report] = Collector()

    async def old(_: web.Request) -> web.Response:
        return web.Response(text=page(1))

    async def new(_: web.Request) -> web.Response:
        return web.Response(text=page(2))

    async with metrics_server(old) as old_port, metrics_server(new) as new_port:
        scraper = scraper_for(reports)
        async with running(scraper.run()):
            await asyncio.sleep(0)
            scraper.upsert(ScrapeTarget(A, "127.0.0.1", old_port))
            await reports.until(lambda items: len(items) >= 1)
            scraper.upsert(ScrapeTarget(A, "127.0.0.1", new_port))
            moved = len(reports.items)
            await reports.until(lambda items: len(items) >= moved + 3)
            assert {metrics.waiting_requests for _, metrics in reports.items[moved:]} == {2.0}
            scraper.remove(A)
            removed = len(reports.items)
            scraper.upsert(ScrapeTarget(B, "127.0.0.1", old_port))
            await reports.until(lambda items: len(items) >= removed + 3)
            assert {endpoint_id for endpoint_id, _ in reports.items[removed:]} == {B}
            assert set(scraper.stats) == {B}
            scraper.remove(A)


async def test_a_callback_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reports: Collector[Report] = Collector()

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=page(1))

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the picker")

    async with metrics_server(serve) as port:
        scraper = scraper_for(reports, on_page=fail)
        scraper.upsert(ScrapeTarget(A, "127.0.0.1", port))
        async with running(scraper.run()):
            await reports.until(lambda items: len(items) >= 3)
    assert "a fault of the picker" in caplog.text


def has_ipv6_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no ::1 on this machine")
async def test_ipv6_and_nothing_left_behind() -> None:
    reports: Collector[Report] = Collector()

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=page(1))

    before = asyncio.all_tasks()
    async with metrics_server(serve, host="::1") as port:
        scraper = scraper_for(reports)
        scraper.upsert(ScrapeTarget(A, "::1", port))
        async with running(scraper.run()):
            await reports.until(lambda items: len(items) >= 1)
    assert asyncio.all_tasks() == before
