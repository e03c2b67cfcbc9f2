"""Random faults on both sides of a sidecar: `python -m benchmarks.soak_sidecar --requests 100000`.

One sidecar process, its own engine and three prefill peers (one of them a port where nobody listens) as
hand-written servers, many clients. Each request carries its faults in a header, so that it is known what
should become of it:

    own engine   fine, slow, stall, reset (at any byte of the answer), garbage, error (a 5xx with a body)
    prefiller    fine, slow, stall, reset, garbage, error, params (what our engine must not follow), dead
    client       fine, slow (body in pieces), leaves (at any moment), half (of a body, then silence),
                 pipelined (the request twice in one write, both to be answered)

Lost: the client was well-behaved and the own engine fine or slow, yet the answer is not exactly the
engine's. Forged: an answer looks complete although the engine broke off, or holds another request's
bytes. Both must be 0, and tasks, sockets and memory of the sidecar must be back where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.sidecar_soak.cases import ENGINE_HOST, PEER_HOST, Tally, draw
from benchmarks.sidecar_soak.clients import TooLate, run_case
from benchmarks.sidecar_soak.process import Child, child, sidecar_process
from benchmarks.sidecar_soak.servers import FaultyServer

CONNECTORS = ("offloading", "nixlv2")
BOUND_S = 60.0
PARTS = 5  # memory is looked at after each
MAX_GROWTH_KB = 16 << 10


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
            except TooLate:
                tally.outcomes["too_late"] += 1
                return
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

        memory = [baseline]
        for part in range(PARTS):
            numbers = range(arguments.requests * part // PARTS, arguments.requests * (part + 1) // PARTS)
            after = await run_many(one, numbers, gate, running, baseline)
            memory.append(after)
    for server in (engine, *peers):
        server.close()
    grown_kb = after["rss_kb"] - memory[1]["rss_kb"]  # since all was warm
    left = {key: after[key] - baseline[key] for key in ("tasks", "sockets", "active")}
    clean = not tally.lost and not tally.forged and max(left.values()) <= 0 and grown_kb <= MAX_GROWTH_KB
    return {
        "connector": connector,
        "requests": arguments.requests,
        "lost": len(tally.lost),
        "forged": len(tally.forged),
        "left_over": left,
        "rss_kb": [census["rss_kb"] for census in memory],
        "objects": [census["objects"] for census in memory],
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
