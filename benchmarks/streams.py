"""`python -m benchmarks.streams --streams 10000`: many conversations at once, dropped in every phase.

Real gRPC over TLS on loopback, one channel a thousand streams. In each phase (headers, mid body, awaiting
the decision, decided, mid answer) streams are opened a thousand at a time until all are open, then all are
cancelled. Prints the time, and resident memory before, with all of them open, and after. Fails if anything
stays open.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from epp.extproc.server import ExtProcServer, ServerSettings
from epp.extproc.service import Limits
from tests.integration.extproc import client
from tests.integration.extproc.handler import Bookkeeper

A_CHANNEL = 1_000
# Opened at a time: gRPC cancels what no handler has taken within 30 s, and both ends share one loop here
A_WAVE = 1_000
PREFIX = b'{"model":"m","prompt":"' + b"x" * 200


async def _headers(stream: Any) -> None:
    await stream.write(client.headers())


async def _mid_body(stream: Any) -> None:
    await stream.write(client.headers())
    await stream.write(client.body(PREFIX))


async def _deciding(stream: Any) -> None:
    await _mid_body(stream)
    await stream.write(client.body(b'"}', end=True))


async def _decided(stream: Any) -> None:
    await _deciding(stream)
    await stream.read()
    await stream.read()


async def _mid_answer(stream: Any) -> None:
    await _decided(stream)
    await stream.write(client.response_headers())
    await stream.write(client.response_body(b"data: {}\n\n"))
    await stream.read()
    await stream.read()


PHASES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "headers": _headers,
    "mid body": _mid_body,
    "deciding": _deciding,
    "decided": _decided,
    "mid answer": _mid_answer,
}


def rss_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def one_phase(name: str, count: int) -> dict[str, float]:
    """Open `count` streams, bring all of them there, drop them, and see that nothing is left."""
    handler = Bookkeeper({"a": "10.0.0.1:8000"})
    if name == "deciding":
        handler.gate = asyncio.Event()
    settings = ServerSettings(
        host="127.0.0.1",
        port=0,
        health_port=None,
        lame_duck_s=0.0,
        keepalive_timeout_s=600.0,  # both ends share one busy loop here
        limits=Limits(write_timeout_s=600.0),
    )
    server = ExtProcServer(handler, ready=lambda: True, settings=settings)
    await server.start()
    started_s = time.monotonic()
    channels = [await client.channel_to(server.port) for _ in range(-(-count // A_CHANNEL))]
    gc.collect()
    before_kb = rss_kb()
    try:
        streams = []
        for wave in range(0, count, A_WAVE):
            opened = [
                client.open_stream(channels[n // A_CHANNEL]) for n in range(wave, min(wave + A_WAVE, count))
            ]
            await asyncio.gather(*(PHASES[name](stream) for stream in opened))
            streams += opened
        async with asyncio.timeout(300):
            while server.stats.streams_open < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        open_kb = rss_kb()
        for stream in streams:
            stream.cancel()
        async with asyncio.timeout(300):
            while server.stats.streams_open or server.stats.deciding:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        for channel in channels:
            await channel.close()
        await server.stop()
    del streams
    gc.collect()
    assert server.stats.streams == count
    assert server.stats.decisions_open == 0
    handler.assert_books_balance()
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "kb_a_stream_both_ends": round((open_kb - before_kb) / count, 1),
        "kb_grown_after": rss_kb() - before_kb,
    }


async def measure(count: int) -> dict[str, Any]:
    found: dict[str, Any] = {"streams": count}
    for name in PHASES:
        found[name] = await one_phase(name, count)
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    print(json.dumps(asyncio.run(measure(parser.parse_args().streams))))


if __name__ == "__main__":
    main()
