"""The engine that `benchmarks.sidecar` measures against: HTTP/1.1 by hand, so that it costs next to nothing.

A POST is answered at once with a small JSON document; with `x-events: N` by a stream of N events, one
every 20 ms. Prints its port on one line and ends with its parent. `--host 0.0.0.0`: one engine under every
loopback address.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import signal
import sys

import uvloop

EVENT_INTERVAL_S = 0.02
_BODY = (
    b'{"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" answer",'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":99,"completion_tokens":1,"total_tokens":100,'
    b'"prompt_tokens_details":{"cached_tokens":64}}}'
)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" tok"}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_PR_SET_PDEATHSIG = 1


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            await reader.readexactly(int(fields.get(b"content-length", b"0")))
            events = int(fields.get(b"x-events", b"0"))
            if events:
                await _stream(writer, events)
            else:
                writer.write(_ANSWER)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, events: int) -> None:
    writer.write(_STREAM)
    await asyncio.sleep(random.random() * EVENT_INTERVAL_S)  # streams of a real engine are not in step
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    for _ in range(events):
        writer.write(_CHUNK)
        await writer.drain()
        due_s += EVENT_INTERVAL_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
    writer.write(b"0\r\n\r\n")


async def _main(host: str) -> None:
    server = await asyncio.start_server(_serve, host, 0, limit=1 << 20)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    uvloop.run(_main(parser.parse_args().host))
