"""Random faults on both sides of a sidecar: `python -m benchmarks.soak_sidecar --requests 100000`.

One sidecar process, its own engine and three prefill peers (one of them a port where nobody listens) as
hand-written servers, many clients. Each request carries its faults in a header, so that it is known what
should become of it:

    own engine   fine, slow, stall, reset (at any byte of the answer), garbage, error (a 5xx with a body)
    prefiller    fine, slow, stall, reset, garbage, error, params (what our engine must not follow), dead
    client       fine, slow (body in pieces), leaves (at any moment), half (of a body, then silence)

Lost: the client was well-behaved and the own engine fine or slow, yet the answer is not exactly the
engine's. Forged: an answer looks complete although the engine broke off, or holds another request's
bytes. Both must be 0, and tasks, sockets and memory of the sidecar must be back where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from sidecar.config import parse_config
from sidecar.server import Sidecar

HOST, ENGINE_HOST, PEER_HOST = "127.0.8.1", "127.0.8.2", "127.0.8.3"
PORT = 8000
CONNECTORS = ("offloading", "nixlv2")
ENGINE = {"fine": 70, "slow": 8, "stall": 1, "reset": 9, "garbage": 5, "error": 7}
PREFILLER = {
    "fine": 30,
    "slow": 10,
    "stall": 2,
    "reset": 14,
    "garbage": 12,
    "error": 12,
    "params": 8,
    "dead": 12,
}
CLIENT = {"fine": 84, "slow": 5, "leaves": 9, "half": 2}
BOUND_S = 60.0
SETTLE_S = 30.0
MAX_GROWTH_KB = 16 << 10
_LIMITS = ("--idle-timeout=8s", "--prefill-timeout=1s", "--body-timeout=2s", "--head-timeout=8s")
_MORE = ("--prefill-retry-backoff=1ms", "--secure-proxy=false", "--log-level=error", "--drain-timeout=2s")


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its faults."""

    number: int
    engine: str
    prefiller: str | None  # None: not split
    client: str
    stream: bool
    size: int  # of the prompt, characters

    @property
    def header(self) -> str:
        return f"{self.number}.{self.engine}.{self.prefiller or 'fine'}.{int(self.stream)}"

    @property
    def answer(self) -> bytes:
        return answer_of(self.number, stream=self.stream)

    @property
    def servable(self) -> bool:
        """Whether a well-behaved client must get the engine's answer."""
        return self.client in ("fine", "slow") and self.engine in ("fine", "slow")


def answer_of(number: int, *, stream: bool) -> bytes:
    """The right body for a request."""
    if not stream:
        return json.dumps({"n": number, "text": f"{number} " * 50}).encode()
    return b"".join(b'data: {"n":%d,"i":%d}\n\n' % (number, i) for i in range(12)) + b"data: [DONE]\n\n"


# --- servers --------------------------------------------------------------------------------------


class FaultyServer:
    """An engine, or a peer's sidecar when `role` is `prefill`; obeys the header of each request."""

    def __init__(self, role: str, seed: int) -> None:
        self._role = role
        self._random = random.Random(seed)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the last: closed under uvloop
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields[b"content-length"]))
        number, engine, prefiller, stream = fields[b"x-case"].decode().split(".")
        fault = prefiller if self._role == "prefill" else engine
        raw = self._answer(int(number), fault, stream == "1", body)
        match fault:
            case "stall":
                await reader.read()
                return False
            case "reset":
                writer.write(raw[: self._random.randrange(len(raw))])
                await asyncio.sleep(0)
                writer.transport.abort()
                return False
            case "garbage":
                writer.write(self._random.randbytes(self._random.randrange(1, 300)) + b"\r\n\r\n")
                return False
            case "slow":
                for at in range(0, len(raw), 97):
                    writer.write(raw[at : at + 97])
                    await writer.drain()
                    await asyncio.sleep(self._random.random() / 500)
            case _:
                writer.write(raw)
                await writer.drain()
        return True

    def _answer(self, number: int, fault: str, stream: bool, body: bytes) -> bytes:
        if fault == "error":
            return _framed(b'{"object":"error"}', b"503 Busy", stream=False)
        if self._role == "prefill":
            params = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e"}
            host = "10.9.9.9" if fault == "params" else PEER_HOST
            answer = {"kv_transfer_params": {**params, "remote_host": host, "remote_port": 5600}}
            return _framed(json.dumps(answer).encode(), stream=False)
        assert b'"prompt"' in body
        return _framed(answer_of(number, stream=stream), stream=stream)


def _framed(body: bytes, status: bytes = b"200 OK", *, stream: bool) -> bytes:
    if not stream:
        head = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"HTTP/1.1 " + status + b"\r\n" + head + body
    events = body.split(b"\n\n")[:-1]
    chunks = b"".join(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event) for event in events)
    head = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return b"HTTP/1.1 " + status + b"\r\n" + head + chunks + b"0\r\n\r\n"


# --- clients --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    forged: list[str] = field(default_factory=list)

    def judge(self, case: Case, raw: bytes | None) -> None:
        status, body = parse(raw) if raw is not None else (0, None)
        right = status == 200 and body == case.answer
        self.outcomes["right" if right else f"status_{status}" if body is not None else "broken"] += 1
        if case.servable and not right:
            self.lost.append(f"{case.header} {case.client}: status {status}")
        if status == 200 and body is not None and body != case.answer:
            self.forged.append(case.header)


def parse(raw: bytes) -> tuple[int, bytes | None]:
    """Status and body of an answer; None for a body whose framing did not end."""
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return 0, None
    status, lower = int(head.split(b" ", 2)[1]), head.lower()
    if b"content-length: " in lower:
        size = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return status, rest if len(rest) == size else None
    body = bytearray()
    while True:
        line, found, rest = rest.partition(b"\r\n")
        if not found:
            return status, None
        size = int(line, 16)
        if len(rest) < size + 2:
            return status, None
        body += rest[:size]
        rest = rest[size + 2 :]
        if not size:
            return status, bytes(body)


async def run_case(case: Case, prefillers: str, chance: random.Random) -> bytes | None:
    """Send one request; all bytes of its answer, None if the client itself left."""
    body = json.dumps({"prompt": "x" * case.size, "stream": case.stream, "max_tokens": 3}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: soak",
        "Content-Type: application/json",
        "Connection: close",
    ]
    lines += [f"Content-Length: {len(body)}", f"x-case: {case.header}", f"x-request-id: r{case.number}"]
    if case.prefiller is not None:
        lines.append(f"x-prefiller-host-port: {prefillers}")
    raw = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    reader, writer = await asyncio.open_connection(HOST, PORT)
    try:
        match case.client:
            case "half":
                writer.write(raw[: -len(body) // 2])
            case "slow":
                step = max(1, len(raw) // 5)
                for at in range(0, len(raw), step):
                    writer.write(raw[at : at + step])
                    await asyncio.sleep(chance.random() / 200)
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


# --- the sidecar's process ------------------------------------------------------------------------


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
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "tasks": len(asyncio.all_tasks()),
        "sockets": sum(link.startswith("socket:") for link in links),
        "rss_kb": int(fields.split()[0]),
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


# --- one run --------------------------------------------------------------------------------------


async def soak(connector: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    chance = random.Random(arguments.seed)
    peers = [await asyncio.start_server(FaultyServer("prefill", n).serve, PEER_HOST, 0) for n in range(2)]
    engine = await asyncio.start_server(FaultyServer("engine", 7).serve, ENGINE_HOST, 0)
    ports = [server.sockets[0].getsockname()[1] for server in peers]
    with_dead = [*ports, 1]  # nobody listens on port 1
    rows = [{"pod": f"p{port}", "host": PEER_HOST, "serving_port": port} for port in with_dead]
    pool = directory / "pool.json"
    await asyncio.to_thread(pool.write_text, json.dumps({"endpoints": rows}))
    tally, gate = Tally(), asyncio.Semaphore(arguments.clients)
    async with sidecar_process(engine.sockets[0].getsockname()[1], pool, connector) as running:
        baseline = await running.census()

        async def one(number: int) -> None:
            case = draw(number, chance)
            order = [PEER_HOST + f":{port}" for port in chance.sample(ports, len(ports))]
            prefillers = (
                f"{PEER_HOST}:1" if case.prefiller == "dead" else ",".join(order[: chance.randint(1, 2)])
            )
            try:
                async with asyncio.timeout(BOUND_S):
                    raw = await run_case(case, prefillers, chance)
            except (TimeoutError, ConnectionError) as error:
                tally.outcomes[type(error).__name__] += 1
                if case.servable:
                    tally.lost.append(f"{case.header} {case.client}: {type(error).__name__}")
                return
            finally:
                gate.release()
            if case.client == "leaves":
                tally.outcomes["left"] += 1
            else:
                tally.judge(case, raw)

        warm = await run_many(one, range(arguments.requests // 5), gate, running, baseline)
        after = await run_many(
            one, range(arguments.requests // 5, arguments.requests), gate, running, baseline
        )
    for server in (engine, *peers):
        server.close()
    grown_kb = after["rss_kb"] - warm["rss_kb"]
    left = {key: after[key] - baseline[key] for key in ("tasks", "sockets", "active")}
    clean = not tally.lost and not tally.forged and max(left.values()) <= 0 and grown_kb <= MAX_GROWTH_KB
    return {
        "connector": connector,
        "requests": arguments.requests,
        "lost": len(tally.lost),
        "forged": len(tally.forged),
        "left_over": left,
        "rss_kb": {"start": baseline["rss_kb"], "after_a_fifth": warm["rss_kb"], "end": after["rss_kb"]},
        "outcomes": dict(tally.outcomes.most_common()),
        "examples": (tally.lost + tally.forged)[:10],
        "clean": clean,
    }


async def run_many(
    one: Any, numbers: range, gate: asyncio.Semaphore, running: Child, baseline: dict[str, int]
) -> dict[str, int]:
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            await gate.acquire()
            group.create_task(one(number))
    return await running.settled(baseline)


def draw(number: int, chance: random.Random) -> Case:
    """The faults of one request."""

    def pick(weights: dict[str, int]) -> str:
        return chance.choices(list(weights), list(weights.values()))[0]

    prefiller = pick(PREFILLER) if chance.random() < 0.7 else None
    size = chance.choice((10, 1_000, 1_000, 20_000, 200_000))
    return Case(number, pick(ENGINE), prefiller, pick(CLIENT), chance.random() < 0.5, size)


async def main_async(arguments: argparse.Namespace) -> int:
    clean = True
    for connector in CONNECTORS:
        with tempfile.TemporaryDirectory() as directory:
            result = await soak(connector, arguments, Path(directory))
        print(json.dumps(result), flush=True)
        clean &= result["clean"]
    return 0 if clean else 1


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        uvloop.run(child(sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="for each connector")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    return uvloop.run(main_async(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
