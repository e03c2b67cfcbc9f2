"""`make bench NAME=engine`: what pulls cost and save in real vLLM engines on a CPU.

Needs .venv-vllm (`make test-engine` makes it). All engines run the same random model (6 KiB of KV a token)
on one machine, one pair at a time: ours, then vLLM's built-in p2p tier behind the same offloading spec. For
each fresh prefix the source computes it (that is the recompute), then the other engine pulls it; the first
pull of a pair connects it. Idle: CPU time of all processes of an engine that nobody asks anything, against
one without a CPU tier.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.engine import processes
from tests.engine.model import Shape, write_model
from tests.engine.pull_engines import (
    PullEngine,
    arguments,
    connector_config,
    environment,
    make_site,
    processes_of,
    prompt,
)
from tests.parity.families import FAMILIES, write_family
from tests.ports import free_ports

SHAPE = Shape(hidden=512, layers=6, heads=8, kv_heads=4, inner=1408)
BYTES_A_TOKEN = 6 * 2 * 4 * 64 * 2
TIER_BYTES = 1 << 30
BLOCKS = {"1k": 32, "4k": 128, "16k": 512}
ROUNDS = {"1k": 5, "4k": 4, "16k": 2}
IDLE_S = 30.0
_numbers = count(1)


@dataclass(slots=True)
class Timings:
    """TTFT in seconds by prefix length."""

    recompute_s: dict[str, list[float]] = field(default_factory=dict)
    pull_s: dict[str, list[float]] = field(default_factory=dict)
    first_pull_s: float = 0.0
    wrong: int = 0


def make_model(root: Path) -> Path:
    family = next(one for one in FAMILIES if one.name == "llama3")
    write_family(family, root / "model")
    write_model(root / "model", bos=family.bos, eos=family.eos, shape=SHAPE)
    return root / "model"


def transfer(kind: str, port: int) -> dict[str, Any] | None:
    """--kv-transfer-config of one engine; `plain`: none."""
    if kind == "plain":
        return None
    config = connector_config(port, None, max_extra_ttft_s=60.0)
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = TIER_BYTES
    if kind == "builtin":
        extra["secondary_tiers"] = [{"type": "p2p", "host": "127.0.0.1", "port": port, "num_threads": 1}]
    return config


@contextlib.contextmanager
def engines(kind: str, number: int, model: Path, root: Path) -> Iterator[list[PullEngine]]:
    started = []
    more = environment(root / "site") | {"OMP_NUM_THREADS": "2"}
    try:
        for at in range(number):
            port, p2p_port = free_ports(2)
            command = arguments(model, port, transfer(kind, p2p_port))
            command[command.index("--max-model-len") + 1] = "20000"
            command[command.index("--num-gpu-blocks-override") + 1] = "1400"
            process = processes.Process(command, root / f"{kind}-{at}.log", more)
            started.append(PullEngine(f"{kind}-{at}", f"http://127.0.0.1:{port}", p2p_port, process))
        for engine in started:
            engine.process.wait_ready([f"{engine.url}/health"])
        yield started
    finally:
        for engine in started:
            engine.process.stop()


def cpu_s(engine: PullEngine) -> float:
    """CPU time that the engine's processes have used so far."""
    ticks = 0
    for pid in processes_of(engine.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def idle_share(engine: PullEngine) -> float:
    engine.complete(prompt(next(_numbers), 4))
    time.sleep(2.0)  # what follows an answer is over
    before, started_s = cpu_s(engine), time.monotonic()
    time.sleep(IDLE_S)
    return (cpu_s(engine) - before) / (time.monotonic() - started_s)


def timed(
    engine: PullEngine, ids: list[int], params: Mapping[str, Any] | None = None
) -> tuple[float, list[int]]:
    started_s = time.perf_counter()
    tokens = engine.complete(ids, params=params, tokens=1, timeout_s=600.0).tokens
    return time.perf_counter() - started_s, tokens


def measure(source: PullEngine, consumer: PullEngine) -> Timings:
    timings = Timings()
    for length in ("1k", *BLOCKS):  # the first round connects
        recompute, pull = timings.recompute_s.setdefault(length, []), timings.pull_s.setdefault(length, [])
        for _ in range(ROUNDS[length]):
            ids = prompt(next(_numbers), BLOCKS[length])
            computed_s, _ = timed(source, ids)
            source.complete(prompt(next(_numbers), 1), tokens=2)  # a step later its stores are over
            _, own = timed(source, ids)
            pulled_s, pulled = timed(consumer, ids, consumer.pull_from(source, str(uuid.uuid4())))
            timings.wrong += pulled != own
            recompute.append(computed_s)
            pull.append(pulled_s)
            if not timings.first_pull_s:
                timings.first_pull_s = pulled_s
                recompute.clear()
                pull.clear()
    return timings


def main() -> int:
    if not processes.PYTHON.exists():
        print("no .venv-vllm here: run `make test-engine` first", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        make_site(root)
        model = make_model(root)
        found: dict[str, Timings] = {}
        idle: dict[str, float] = {}
        for kind, number in (("plain", 1), ("ours", 2), ("builtin", 2)):
            with engines(kind, number, model, root) as running:
                idle[kind] = idle_share(running[0])
                if number == 2:
                    found[kind] = measure(*running)
                    idle[f"{kind}, session open"] = idle_share(running[0])
    report(found, idle)
    return 0


def report(found: Mapping[str, Timings], idle: Mapping[str, float]) -> None:
    ours, builtin = found["ours"], found["builtin"]
    print(f"{'prefix':>7} {'recompute s':>12} {'ours s':>9} {'built-in s':>11} {'KV MB':>7}   (medians)")
    for length, blocks in BLOCKS.items():
        row = [
            statistics.median(one)
            for one in (ours.recompute_s[length], ours.pull_s[length], builtin.pull_s[length])
        ]
        print(
            f"{length:>7} {row[0]:12.3f} {row[1]:9.3f} {row[2]:11.3f} "
            f"{blocks * 32 * BYTES_A_TOKEN / 1e6:7.1f}"
        )
    print(f"first pull of a pair (1k): ours {ours.first_pull_s:.3f} s, built-in {builtin.first_pull_s:.3f} s")
    print(f"answers unlike the source's own cache hit: ours {ours.wrong}, built-in {builtin.wrong}")
    for name, share in idle.items():
        print(f"idle, {name}: {100 * share:.1f}% of a core")

    def ratio(length: str) -> float:
        return statistics.median(ours.pull_s[length]) / statistics.median(builtin.pull_s[length])

    set_up = ours.first_pull_s - statistics.median(ours.pull_s["1k"])
    set_up_builtin = builtin.first_pull_s - statistics.median(builtin.pull_s["1k"])
    measures = {
        "ttft_4k_vs_builtin": ratio("4k"),
        "ttft_16k_vs_builtin": ratio("16k"),
        "session_setup_vs_builtin": set_up / set_up_builtin if set_up_builtin > 0 else None,
        "idle_core_share": max(idle["ours"], idle["ours, session open"]) - idle["plain"],
        "idle_core_share_builtin": idle["builtin"] - idle["plain"],
        "pull_vs_recompute_4k": statistics.median(ours.pull_s["4k"])
        / statistics.median(ours.recompute_s["4k"]),
    }
    print(json.dumps({name: None if value is None else round(value, 4) for name, value in measures.items()}))


if __name__ == "__main__":
    sys.exit(main())
