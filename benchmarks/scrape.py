"""`make bench NAME=scrape`: what following the metrics of many engines costs. One JSON object, last line.

Engines are one HTTP server in a process of its own under as many loopback addresses as there are endpoints;
its page is that of a real vLLM, padded to 75 KB. The scraper runs here, on uvloop, as in the picker:

    25 endpoints every 50 ms, and 1,000 every 2 s: both are 500 pages a second

`core_share`: cores used by this process; `pages_per_s`: what was reached; `late`: how much longer than asked
an interval took in the middle; `us_read_only`: CPU to get one page and look at nothing, by a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from engine_plugin.identity import EndpointId
from epp.endpoints.scraper import MetricsScraper, ScrapeTarget

EXCERPT = Path(__file__).parents[1] / "tests" / "data" / "metrics" / "vllm-0.32-excerpt.txt"
PAGE_BYTES = 75_000
CASES = ((25, 0.05), (1_000, 2.0))
TARGET_CORES = 0.5
_PR_SET_PDEATHSIG = 1


def page() -> bytes:
    """The excerpt among histograms, as on a real page."""
    text = EXCERPT.read_bytes()
    line = b'vllm:e2e_request_latency_seconds_bucket{engine="0",le="%d.0",model_name="m"} 1.0\n'
    filler = b"".join(line % number for number in range(1_000))
    half = (PAGE_BYTES - len(text)) // 2
    return filler[:half].rpartition(b"\n")[0] + b"\n" + text + filler[:half].rpartition(b"\n")[0] + b"\n"


class _Engine(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"\r\n\r\n")):
            self._transport.write(self._answer)


async def _serve() -> None:
    body = page()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
    answer = head % len(body) + body
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Engine(answer), "0.0.0.0", 0, backlog=2048)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextmanager
def engines() -> Iterator[int]:
    """The server's port."""
    process = subprocess.Popen((sys.executable, "-m", "benchmarks.scrape", "--serve"), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


def read_only_us(port: int, count: int = 300) -> float:
    """CPU to ask for a page and take its bytes from the socket."""
    length = len(page())
    with socket.create_connection(("127.0.10.1", port)) as connection:
        started_s = time.process_time()
        for _ in range(count):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            left = length + 96
            while left > 0:
                got = len(connection.recv(1 << 17))
                left -= got
                if left < 40:  # the head is a little shorter than its bound
                    break
        return (time.process_time() - started_s) / count * 1e6


async def follow(port: int, endpoints: int, interval_s: float, seconds: float) -> dict[str, float]:
    pages = 0

    def count(*_: object) -> None:
        nonlocal pages
        pages += 1

    scraper = MetricsScraper(
        on_metrics=count, clock=time.monotonic, rng=random.Random(1), interval_s=interval_s
    )
    for number in range(endpoints):
        host = f"127.0.{10 + number // 250}.{number % 250 + 1}"
        scraper.upsert(ScrapeTarget(EndpointId(f"e{number}"), host, port))
    running = asyncio.create_task(scraper.run())
    await asyncio.sleep(2 * interval_s + 2.0)  # every connection is open
    before, cpu_s, started_s = pages, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed_s = time.perf_counter() - started_s
    share = (time.process_time() - cpu_s) / elapsed_s
    reached = (pages - before) / elapsed_s
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {
        "core_share": round(share, 3),
        "pages_per_s": round(reached, 1),
        "us_a_page": round(share / reached * 1e6, 1),
        "late": round(endpoints / interval_s / reached, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        uvloop.run(_serve())
        return
    with engines() as port:
        result: dict[str, Any] = {"us_read_only": round(read_only_us(port), 1)}
        for endpoints, interval_s in CASES:
            result[f"{endpoints}_at_{interval_s}s"] = uvloop.run(
                follow(port, endpoints, interval_s, arguments.seconds)
            )
    print(json.dumps(result | {"target_cores": TARGET_CORES, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
