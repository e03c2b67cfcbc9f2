"""What a sidecar adds: `make bench NAME=sidecar`. One JSON object on standard output.

One engine double, reached directly, through the sidecar and through Envoy as a plain proxy, in turn
within one loop, so that noise of the machine hits all three alike. Every request of the sidecar names a
source, so its body is rewritten. Figures:

    added_p50_ms_1k, added_p50_ms_200k   p50 through the sidecar minus p50 direct, by body size
    vs_envoy_p50                         p50 through the sidecar minus p50 through Envoy, ms, by body size
    cpu_ms_1k, cpu_ms_200k               CPU time of the sidecar's process a request (noise-free)
    first_byte_added_ms                  p50 to the first byte of a stream's answer, minus the same direct
    sse_core_share                       cores used for `streams` streams of 50 events/s
    kb_per_stream                        growth of resident memory a stream, 50 events/s under way
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from deploy.local.envoy import EnvoyCommand, find_binary

HOST, PEER = "127.0.7.1", "127.0.7.2"
SIDECAR_PORT, ENVOY_PORT, ADMIN_PORT = 8000, 8010, 8011
EVENTS_PER_S = 50
FIRST_BYTES = 150  # streams a route
TARGETS = {"added_p50_ms_1k": 0.8, "added_p50_ms_200k": 1.5, "sse_core_share": 0.6, "kb_per_stream": 100.0}
_TYPE = "type.googleapis.com/envoy.extensions.filters."
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Rig:
    """Who listens where, and the sidecar's process."""

    engine_port: int
    sidecar_pid: int

    @property
    def routes(self) -> dict[str, tuple[str, int]]:
        return {
            "direct": ("127.0.0.1", self.engine_port),
            "sidecar": (HOST, SIDECAR_PORT),
            "envoy": (HOST, ENVOY_PORT),
        }

    def cpu_s(self) -> float:
        """CPU time of the sidecar so far."""
        fields = Path(f"/proc/{self.sidecar_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss_kb(self) -> int:
        for line in Path(f"/proc/{self.sidecar_pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise RuntimeError("no VmRSS")


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Rig]:
    """Engine, sidecar and Envoy as processes."""
    with contextlib.ExitStack() as stack:
        engine = _start(stack, sys.executable, "-m", "benchmarks.sidecar_engine", stdout=subprocess.PIPE)
        assert engine.stdout is not None
        port = int(engine.stdout.readline())
        pool = directory / "pool.json"
        rows = [{"pod": "peer", "host": PEER, "serving_port": 8000}]
        pool.write_text(json.dumps({"endpoints": rows}))
        flags = ["--listen-host", HOST, "--model-server-port", str(port), "--kv-connector", "offloading"]
        flags += ["--endpoints-file", str(pool), "--secure-proxy=false", "--log-level", "error"]
        sidecar = _start(stack, sys.executable, "-m", "sidecar", *flags)
        bootstrap = directory / "envoy.json"
        bootstrap.write_text(json.dumps(_bootstrap(port)))
        _start(stack, *EnvoyCommand(find_binary(), bootstrap).argv())
        yield Rig(port, sidecar.pid)


def _start(stack: contextlib.ExitStack, *argv: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdout=stdout)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _bootstrap(engine_port: int) -> dict[str, Any]:
    def address(host: str, port: int) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": port}}

    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": _TYPE + "http.router.v3.Router"}}
    manager = {
        "@type": _TYPE + "network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plain",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [router],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoint = {"endpoint": {"address": address("127.0.0.1", engine_port)}}
    cluster = {
        "name": "engine",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "engine", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    return {
        "admin": {"address": address(HOST, ADMIN_PORT)},
        "static_resources": {
            "listeners": [{"name": "plain", "address": address(HOST, ENVOY_PORT), "filter_chains": [chain]}],
            "clusters": [cluster],
        },
    }


class Connection:
    """A keep-alive client connection; as little as possible between the socket and the clock."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Connection:
        """Connect, waiting for a server that is just starting."""
        for _ in range(600):
            try:
                return cls(*await asyncio.open_connection(*address, limit=1 << 22))
            except OSError:
                await asyncio.sleep(0.05)
        raise TimeoutError(f"nobody listens on {address}")

    async def post(self, request: bytes) -> float:
        """Seconds from the first byte sent to the last byte received."""
        started_s = time.perf_counter()
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode())
        if b"transfer-encoding: chunked" in head:
            await self.drain()
        else:
            await self._reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        return time.perf_counter() - started_s

    async def start_stream(self, events: int) -> None:
        """Ask for a stream; back once its head is here."""
        self._writer.write(_request(b'{"prompt":"p","stream":true}', f"x-events: {events}"))
        await self._reader.readuntil(b"\r\n\r\n")

    async def drain(self) -> int:
        """Bytes up to the end of the stream's chunks."""
        total = 0
        while True:
            size = int(await self._reader.readline(), 16)
            await self._reader.readexactly(size + 2)
            if not size:
                return total
            total += size

    def close(self) -> None:
        self._writer.close()


def _request(body: bytes, *more: str) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "Host: bench", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", f"x-kv-cache-source-host-port: {PEER}:8000", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def latencies(rig: Rig, body_bytes: int, count: int) -> dict[str, float]:
    """p50 by route in ms, and the sidecar's CPU time a request."""
    filler = "x" * (body_bytes - 60)
    request = _request(json.dumps({"model": "m", "max_tokens": 16, "prompt": filler}).encode())
    connections = {name: await Connection.open(address) for name, address in rig.routes.items()}
    samples: dict[str, list[float]] = {name: [] for name in connections}
    for _ in range(50):
        for connection in connections.values():
            await connection.post(request)
    cpu_s = rig.cpu_s()
    for _ in range(count):
        for name, connection in connections.items():
            samples[name].append(await connection.post(request))
    cpu_s = rig.cpu_s() - cpu_s
    for connection in connections.values():
        connection.close()
    found = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
    return found | {"cpu": cpu_s / count * 1e3}


async def first_bytes(rig: Rig, count: int) -> dict[str, float]:
    """p50 by route in ms from a stream's request to the first byte of its answer."""
    connections = {name: await Connection.open(address) for name, address in rig.routes.items()}
    samples: dict[str, list[float]] = {name: [] for name in connections}
    for _ in range(count):
        for name, connection in connections.items():
            started_s = time.perf_counter()
            await connection.start_stream(1)
            samples[name].append(time.perf_counter() - started_s)
            await connection.drain()
    for connection in connections.values():
        connection.close()
    return {name: statistics.median(values) * 1e3 for name, values in samples.items()}


async def streams(rig: Rig, count: int, seconds: float) -> tuple[float, float]:
    """Cores used while `count` streams run, and KB of resident memory a stream."""
    events = int((seconds + 2) * EVENTS_PER_S)
    connections = [await Connection.open((HOST, SIDECAR_PORT)) for _ in range(count)]
    before_kb = rig.rss_kb()
    await asyncio.gather(*(connection.start_stream(events) for connection in connections))
    reading = [asyncio.create_task(connection.drain()) for connection in connections]
    await asyncio.sleep(1.0)
    started_s, cpu_s = time.perf_counter(), rig.cpu_s()
    await asyncio.sleep(seconds)
    share = (rig.cpu_s() - cpu_s) / (time.perf_counter() - started_s)
    grown_kb = rig.rss_kb() - before_kb
    received = set(await asyncio.gather(*reading))
    assert len(received) == 1, "every stream has the same bytes"
    for connection in connections:
        connection.close()
    return share, grown_kb / count


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with running(directory) as rig:
        small = await latencies(rig, 1 << 10, arguments.requests)
        large = await latencies(rig, 200 << 10, max(50, arguments.requests // 4))
        first = await first_bytes(rig, FIRST_BYTES)
        share, kb_per_stream = await streams(rig, arguments.streams, arguments.seconds)
    result: dict[str, Any] = {
        "added_p50_ms_1k": round(small["sidecar"] - small["direct"], 3),
        "added_p50_ms_200k": round(large["sidecar"] - large["direct"], 3),
        "first_byte_added_ms": round(first["sidecar"] - first["direct"], 3),
        "first_byte_envoy_added_ms": round(first["envoy"] - first["direct"], 3),
        "sse_core_share": round(share, 3),
        "kb_per_stream": round(kb_per_stream, 1),
        "vs_envoy_p50": {
            "1k": round(small["sidecar"] - small["envoy"], 3),
            "200k": round(large["sidecar"] - large["envoy"], 3),
        },
        "envoy_added_p50_ms": {
            "1k": round(small["envoy"] - small["direct"], 3),
            "200k": round(large["envoy"] - large["direct"], 3),
        },
        "cpu_ms_1k": round(small["cpu"], 3),
        "cpu_ms_200k": round(large["cpu"], 3),
        "streams": arguments.streams,
        "requests": arguments.requests,
        "load_average": os.getloadavg()[0],
    }
    return result | {"missed": [name for name, most in TARGETS.items() if result[name] > most]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of 1 KB, a quarter of 200 KB")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="of streaming that are measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(uvloop.run(measure(arguments, Path(directory)))))


if __name__ == "__main__":
    main()
