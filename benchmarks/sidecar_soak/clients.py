"""Clients with faults: slow, gone, silent, or with two requests at once."""

from __future__ import annotations

import asyncio
import json
import random
import time

from benchmarks.sidecar_soak.cases import HOST, PORT, Case

LONGEST_SEND_S = 1.0  # of a slow client: half of the sidecar's limit for a body


class TooLate(Exception):
    """This machine was so busy that a client that meant to be within the limit was not: no case at all."""


async def run_case(case: Case, prefillers: str, chance: random.Random) -> bytes | None:
    """Send one request; all bytes of its answer, None if the client itself left."""
    body = json.dumps({"prompt": "x" * case.size, "stream": case.stream, "max_tokens": 3}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: soak", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", f"x-case: {case.header}", f"x-request-id: r{case.number}"]
    if case.prefiller is not None:
        lines.append(f"x-prefiller-host-port: {prefillers}")
    head = "\r\n".join(lines).encode() + b"\r\n"
    raw = head + b"Connection: close\r\n\r\n" + body
    reader, writer = await asyncio.open_connection(HOST, PORT)
    try:
        match case.client:
            case "half":
                writer.write(raw[: -len(body) // 2])
            case "pipelined":
                writer.write(head + b"\r\n" + body + raw)
            case "slow":
                step, started_s = max(1, len(raw) // 5), time.monotonic()
                for at in range(0, len(raw), step):
                    writer.write(raw[at : at + step])
                    await asyncio.sleep(chance.random() / 200)
                if time.monotonic() - started_s > LONGEST_SEND_S:
                    raise TooLate
            case _:
                writer.write(raw)
        if case.client == "leaves":
            await asyncio.wait(
                {reading := asyncio.ensure_future(reader.read())}, timeout=chance.random() / 30
            )
            reading.cancel()
            return None
        return await _read_all(reader)
    finally:
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Up to the end, or to a reset: what had arrived by then counts."""
    pieces = bytearray()
    try:
        while piece := await reader.read(1 << 16):
            pieces += piece
    except ConnectionError:
        pass
    return bytes(pieces)
