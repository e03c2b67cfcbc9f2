"""The sidecar's process, and how many tasks, sockets and KB it has."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.sidecar_soak.cases import ENGINE_HOST, HOST
from sidecar.config import parse_config
from sidecar.server import Sidecar

SETTLE_S = 30.0
_LIMITS = ("--idle-timeout=8s", "--prefill-timeout=1s", "--body-timeout=2s", "--head-timeout=8s")
_MORE = ("--prefill-retry-backoff=1ms", "--secure-proxy=false", "--log-level=error", "--drain-timeout=2s")

_LIBC: Final = ctypes.CDLL(None)


async def child(argv: list[str]) -> None:
    """A sidecar that tells how many tasks, sockets and KB it has, a line for each line it is sent."""
    async with Sidecar(parse_config(argv, {})) as sidecar:
        sidecar.health.now_s = lambda: time.monotonic() * 1000  # pauses of ms, or few faults would be met
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(_census(sidecar)), flush=True)


def _census(sidecar: Sidecar) -> dict[str, int]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    gc.collect()
    _LIBC.malloc_trim(0)  # memory that is free and that the allocator only keeps is no leak
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "tasks": len(asyncio.all_tasks()),
        "sockets": sum(link.startswith("socket:") for link in links),
        "rss_kb": int(fields.split()[0]),
        "objects": len(gc.get_objects()),
        "active": int(sidecar.telemetry.value("kvpull_sidecar_active_requests")),
    }


@dataclass(slots=True)
class Child:
    process: asyncio.subprocess.Process

    async def census(self) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        found: dict[str, int] = json.loads(await self.process.stdout.readline())
        return found

    async def settled(self, baseline: dict[str, int]) -> dict[str, int]:
        """The census once tasks and sockets are back, or after the bound."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            found = await self.census()
            if all(found[key] <= baseline[key] for key in ("tasks", "sockets", "active")):
                return found
            if time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.2)


@asynccontextmanager
async def sidecar_process(engine_port: int, pool: Path, connector: str) -> AsyncIterator[Child]:
    argv = [
        "--listen-host",
        HOST,
        "--model-server-host",
        ENGINE_HOST,
        "--model-server-port",
        str(engine_port),
    ]
    argv += ["--kv-connector", connector, "--endpoints-file", str(pool), *_LIMITS, *_MORE]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.soak_sidecar", "--child", *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # a warning for every answer that was broken off
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
