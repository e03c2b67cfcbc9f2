"""`make bench NAME=index_load`: what the event intake costs the loop that schedules, and the process.

* storm: a restarted picker swallows replays of 5M blocks (64 engines in another process, real ZMQ) while
  requests are scheduled over 64 other, warm endpoints. How much later are decisions than without it?
* sustained: 256 engines store 320K and remove 320K blocks/s for 20 s. Share of a core (all threads of
  this process, CPU time), backlog, batches lost.

Everything is the product's own: `KvEventsManager`, `CacheView`, `EndpointPicker`, the index that is
chosen here. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import uvloop

from benchmarks.load_engines import HOST
from benchmarks.schedule import build
from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.index_choice import choose_index
from epp.core.types import Endpoint, SchedulingRequest
from epp.kvevents.link import EventSource
from epp.kvevents.manager import KvEventsManager
from epp.kvevents.packed_codec import choose_decoder

WARM_ENDPOINTS = 64
PROBE_INTERVAL_S = 0.005
QUIET_S = 8.0


@dataclass(frozen=True, slots=True)
class Engines:
    process: subprocess.Popen[str]
    ports: list[tuple[int, int]]
    messages: int

    def go(self) -> None:
        stream: IO[str] | None = self.process.stdin
        assert stream is not None
        stream.write("\n")
        stream.flush()


@contextmanager
def engines(mode: str, endpoints: int, amount: float, event_blocks: int) -> Iterator[Engines]:
    command = [sys.executable, "-m", "benchmarks.load_engines", mode]
    command += [str(endpoints), str(amount), str(event_blocks)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield Engines(process, [(int(a), int(b)) for a, b in said["ports"]], said["messages"])
    finally:
        process.kill()
        process.wait()


def add_engines(picker: EndpointPicker, manager: KvEventsManager, ports: list[tuple[int, int]]) -> None:
    for number, (events_port, replay_port) in enumerate(ports):
        endpoint = Endpoint(EndpointId(f"engine-{number:03d}"), HOST, events_port)
        picker.upsert_endpoint(endpoint)
        manager.add_endpoint(endpoint.id, EventSource(HOST, events_port, replay_port))


async def claims(picker: EndpointPicker, names: list[EndpointId], running: asyncio.Task[None]) -> None:
    """Wait until every endpoint has been replayed."""
    async with asyncio.timeout(600):
        while not all(picker.cache.state(name).has_claim for name in names):
            await asyncio.wait([running], timeout=0.1)
            if running.done():
                running.result()


async def probe(picker: EndpointPicker, request: SchedulingRequest, end: asyncio.Event) -> list[float]:
    """Schedule one request every 5 ms; seconds from when each was due to its decision."""
    clock, taken_s, number = time.monotonic, [], 0
    while not end.is_set():
        due_s = clock() + PROBE_INTERVAL_S
        await asyncio.sleep(PROBE_INTERVAL_S)
        picker.schedule(request, clock(), f"d{number}")
        picker.release(f"d{number}")
        taken_s.append(clock() - due_s)
        number += 1
    return taken_s


def percentiles_ms(taken_s: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(taken_s, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3, max(taken_s) * 1e3


async def quiet(picker: EndpointPicker, request: SchedulingRequest) -> list[float]:
    end = asyncio.Event()
    asyncio.get_running_loop().call_later(QUIET_S, end.set)
    return await probe(picker, request, end)


async def storm(blocks: int, event_blocks: int) -> dict[str, float]:
    picker, request = build(WARM_ENDPOINTS)
    with engines("storm", 64, blocks, event_blocks) as made:
        manager = KvEventsManager(picker.cache, decode=choose_decoder(choose_index().implementation).decode)
        names = [EndpointId(f"engine-{n:03d}") for n in range(len(made.ports))]
        gc.freeze()
        before = await quiet(picker, request)
        running = asyncio.create_task(manager.run())
        started_s, cpu_s = time.monotonic(), time.process_time()
        add_engines(picker, manager, made.ports)
        end = asyncio.Event()
        probing = asyncio.create_task(probe(picker, request, end))
        await claims(picker, names, running)
        storm_s, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
        end.set()
        during = await probing
        after = await quiet(picker, request)
        stats = [picker.cache.stats(name).index.device_blocks for name in names]
        running.cancel()
        await asyncio.wait([running])
    assert sum(stats) == made.messages * event_blocks, "the storm was not swallowed whole"
    for name, samples in (("before", before), ("during", during), ("after", after)):
        p50, p99, most = percentiles_ms(samples)
        print(
            f"{name:>7}: {len(samples):>6} decisions, p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {most:.2f} ms"
        )
    rise = percentiles_ms(during)[1] - percentiles_ms([*before, *after])[1]
    print(
        f"storm: {sum(stats):,} blocks in {storm_s:.1f} s ({cpu_s:.1f} s of CPU); p99 rises by {rise:.2f} ms"
    )
    return {
        "replay_added_p99_ms": rise,
        "storm_blocks": sum(stats),
        "storm_s": storm_s,
        "storm_cpu_s": cpu_s,
        "storm_decisions": len(during),
    }


async def sustained(
    endpoints: int, blocks_per_s: float, seconds: float, event_blocks: int
) -> dict[str, float]:
    picker, _ = build(1)
    with engines("sustained", endpoints, blocks_per_s / endpoints, event_blocks) as made:
        manager = KvEventsManager(picker.cache, decode=choose_decoder(choose_index().implementation).decode)
        running = asyncio.create_task(manager.run())
        add_engines(picker, manager, made.ports)
        names = [EndpointId(f"engine-{n:03d}") for n in range(len(made.ports))]
        await claims(picker, names, running)
        made.go()
        await asyncio.sleep(5.0)
        count = _counter(picker, names)
        stored, removed, messages = count()
        started_s, cpu_s, backlog = time.monotonic(), time.process_time(), []
        while time.monotonic() - started_s < seconds:
            await asyncio.sleep(0.25)
            backlog.append(manager.backlog)
        elapsed_s, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
        stored, removed, messages = (b - a for a, b in zip((stored, removed, messages), count(), strict=True))
        lost = sum(picker.cache.stats(name).counters.gaps for name in names)
        running.cancel()
        await asyncio.wait([running])
    quarter = max(1, len(backlog) // 4)
    first, last = statistics.mean(backlog[:quarter]), statistics.mean(backlog[-quarter:])
    print(
        f"sustained: {endpoints} endpoints, {stored / elapsed_s:,.0f} stored and {removed / elapsed_s:,.0f} "
        f"removed blocks/s in {messages / elapsed_s:,.0f} messages/s for {elapsed_s:.0f} s: "
        f"{cpu_s / elapsed_s:.2f} of a core; backlog {first:.1f} -> {last:.1f} messages "
        f"(at most {max(backlog)}); gaps {lost}"
    )
    return {
        "sustained_core_share": cpu_s / elapsed_s,
        "sustained_stored_per_s": stored / elapsed_s,
        "sustained_removed_per_s": removed / elapsed_s,
        "sustained_backlog_end": last,
        "sustained_gaps": lost,
    }


def _counter(picker: EndpointPicker, names: list[EndpointId]) -> Callable[[], tuple[int, int, int]]:
    def count() -> tuple[int, int, int]:
        counters = [picker.cache.stats(name).counters for name in names]
        return (
            sum(c.stored_blocks for c in counters),
            sum(c.removed_blocks for c in counters),
            sum(c.live_batches for c in counters),
        )

    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storm-blocks", type=int, default=5_000_000)
    parser.add_argument("--endpoints", type=int, default=256)
    parser.add_argument("--blocks-per-s", type=float, default=320_000, help="stored, and as many removed")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--event-blocks", type=int, default=128, help="of one event: 2,048 prompt tokens")
    args = parser.parse_args()
    figures = uvloop.run(storm(args.storm_blocks, args.event_blocks)) if args.storm_blocks else {}
    if args.endpoints:
        figures |= uvloop.run(sustained(args.endpoints, args.blocks_per_s, args.seconds, args.event_blocks))
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
