"""`make bench NAME=extproc`: what the picker adds to one request. One JSON object on the last line.

The whole ext-proc hop (parse, tokenise, match, schedule, mutate, observe the answer) against the same
Envoy without the filter, in turn within one loop, so that noise of the machine hits both alike. Figures:

    added_p50_ms_1k, _200k     p50 with the picker minus p50 without, one request at a time
    cpu_ms_1k, _200k           CPU time of the picker's process a request, less what it uses when idle

    *_of_bare                  the same, in times of what a server of the same library needs that only passes
                               messages on (benchmarks.extproc_bare): comparable between machines

1 KB is asked of the picker with a tokenizer, 200 KB of the one without. `--plot FILE` draws the growth
with concurrency, for 1 KB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.extproc_rig import Process, Rig, running
from benchmarks.sidecar import Connection

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
TARGETS = {"added_p50_ms_1k": 1.6, "cpu_ms_1k": 1.2, "cpu_ms_200k": 2.2}
IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one picker and one size: added p50 and CPU a request, in ms."""

    added_p50_ms: float
    plain_p50_ms: float
    cpu_ms: float
    requests_per_s: float = 0.0


def _request(body_bytes: int, number: int) -> bytes:
    """A completion whose prompt nobody has seen."""
    words = f"{number} " + "the cat sat on a mat and looked at all of it again " * (body_bytes // 50)
    body = json.dumps({"model": "m", "max_tokens": 16, "prompt": words[: body_bytes - 60]}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _idle_share(picker: Process) -> float:
    """Cores the picker uses when nobody asks it."""
    before_s, started_s = picker.cpu_s(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (picker.cpu_s() - before_s) / (time.perf_counter() - started_s)


async def one_at_a_time(rig: Rig, names: Sequence[str], body_bytes: int, count: int) -> dict[str, Figures]:
    """p50s of the same requests through each picker and without one, one after the other."""
    routes = ("plain", *names)
    connections = {name: await Connection.open(rig.routes[name]) for name in routes}
    samples: dict[str, list[float]] = {name: [] for name in routes}
    for number in range(100):
        for connection in connections.values():
            await connection.post(_request(body_bytes, number))
    idle = {name: await _idle_share(rig.pickers[name]) for name in names}
    cpu_s, started_s = {name: rig.pickers[name].cpu_s() for name in names}, time.perf_counter()
    for number in range(count):
        for name, connection in connections.items():
            samples[name].append(await connection.post(_request(body_bytes, count + number)))
    elapsed_s = time.perf_counter() - started_s
    cpu_s = {name: rig.pickers[name].cpu_s() - cpu_s[name] - idle[name] * elapsed_s for name in names}
    for connection in connections.values():
        connection.close()
    p50_ms = {name: statistics.median(found) * 1e3 for name, found in samples.items()}
    plain_ms = p50_ms["plain"]
    return {name: Figures(p50_ms[name] - plain_ms, plain_ms, cpu_s[name] / count * 1e3) for name in names}


async def at_once(rig: Rig, route: str, concurrency: int, seconds: float) -> tuple[list[float], float, float]:
    """Latencies in s, requests a second and the picker's CPU ms a request, `concurrency` clients asking."""
    connections = [await Connection.open(rig.routes[route]) for _ in range(concurrency)]
    samples: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def ask(connection: Connection, client: int) -> None:
        number = client << 20
        while time.perf_counter() < ends_s:
            samples.append(await connection.post(_request(1 << 10, number)))
            number += 1

    picker = rig.pickers.get(route)
    cpu_s, started_s = picker.cpu_s() if picker else 0.0, time.perf_counter()
    await asyncio.gather(*(ask(connection, n) for n, connection in enumerate(connections)))
    elapsed_s = time.perf_counter() - started_s
    cpu_s = (picker.cpu_s() if picker else 0.0) - cpu_s
    for connection in connections:
        connection.close()
    return samples, len(samples) / elapsed_s, cpu_s / len(samples) * 1e3


async def growth(rig: Rig, seconds: float) -> dict[int, Figures]:
    found: dict[int, Figures] = {}
    for concurrency in CONCURRENCY:
        plain, _, _ = await at_once(rig, "plain", concurrency, seconds / 2)
        picked, rate, cpu_ms = await at_once(rig, "tokens", concurrency, seconds)
        p50_ms = [statistics.median(samples) * 1e3 for samples in (plain, picked)]
        found[concurrency] = Figures(p50_ms[1] - p50_ms[0], p50_ms[0], cpu_ms, rate)
    return found


def plot(path: Path, figures: dict[int, Figures]) -> None:
    """Latency and CPU a request, and requests a second, over concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvpull"
    from matplotlib import pyplot

    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    across = list(figures)
    left.plot(across, [f.added_p50_ms for f in figures.values()], marker="o", label="added p50, ms")
    left.plot(across, [f.cpu_ms for f in figures.values()], marker="o", label="picker's CPU a request, ms")
    left.set_yscale("log")
    right.plot(across, [f.requests_per_s for f in figures.values()], marker="o", label="requests a second")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests at once (1 KB)")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    canvas.tight_layout()
    canvas.savefig(path, metadata={"Date": None})


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with running(directory, endpoints=arguments.endpoints) as rig:
        small = await one_at_a_time(rig, ("tokens", "load", "bare"), 1 << 10, arguments.requests)
        large = await one_at_a_time(rig, ("load", "bare"), 200 << 10, arguments.requests // 4)
        result: dict[str, float] = {
            "added_p50_ms_1k": small["tokens"].added_p50_ms,
            "added_p50_ms_200k": large["load"].added_p50_ms,
            "cpu_ms_1k": small["tokens"].cpu_ms,
            "cpu_ms_1k_without_tokens": small["load"].cpu_ms,
            "cpu_ms_200k": large["load"].cpu_ms,
            "plain_p50_ms_1k": small["bare"].plain_p50_ms,
            "plain_p50_ms_200k": large["bare"].plain_p50_ms,
            "bare_cpu_ms_1k": small["bare"].cpu_ms,
            "bare_cpu_ms_200k": large["bare"].cpu_ms,
            "added_1k_of_bare": small["tokens"].added_p50_ms / small["bare"].added_p50_ms,
            "added_200k_of_bare": large["load"].added_p50_ms / large["bare"].added_p50_ms,
            "cpu_1k_of_bare": small["tokens"].cpu_ms / small["bare"].cpu_ms,
            "cpu_1k_without_tokens_of_bare": small["load"].cpu_ms / small["bare"].cpu_ms,
            "cpu_200k_of_bare": large["load"].cpu_ms / large["bare"].cpu_ms,
        }
        if arguments.plot:
            figures = await growth(rig, arguments.seconds)
            plot(arguments.plot, figures)
            for concurrency, found in figures.items():
                print(
                    f"{concurrency:>4} at once: {found.requests_per_s:>7.0f}/s, "
                    f"added p50 {found.added_p50_ms:.2f} ms, CPU {found.cpu_ms:.2f} ms a request"
                )
    missed = [name for name, most in TARGETS.items() if result[name] > most]
    rounded = {name: round(value, 3) for name, value in result.items()}
    more = {"missed": missed, "endpoints": arguments.endpoints, "load_average": os.getloadavg()[0]}
    return rounded | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of 1 KB, a quarter of 200 KB")
    parser.add_argument("--endpoints", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each concurrency")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(uvloop.run(measure(arguments, Path(directory)))))


if __name__ == "__main__":
    main()
