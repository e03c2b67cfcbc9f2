"""`make bench NAME=engine`: what pulls cost and save in real vLLM engines on a CPU.

Needs .venv-vllm (`make test-engine` makes it). All engines run the same random model (2 KiB of KV a token, or
6 with `--shape small`) on one machine, one pair at a time: ours, then vLLM's built-in p2p tier behind our
offloading spec. For each fresh prefix the source computes it (that is the recompute), then the other engine
pulls it; the first pull of a pair connects it. Idle: CPU time of all processes of an engine that nobody asks
anything, against one without a CPU tier. Scheduler: CPU time of all calls of vLLM into our tier and policy,
as a share of the time of a source's steps, while it decodes and is pulled from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from deploy.local.spec import ROOT
from deploy.local.vllm.site import make_site
from tests.engine import processes
from tests.engine.model import Shape, write_model
from tests.engine.pull_engines import (
    KEY,
    PullEngine,
    arguments,
    connector_config,
    environment,
    processes_of,
    prompt,
    until,
)
from tests.parity.families import FAMILIES, write_family
from tests.ports import free_ports

SHAPES = {
    "tiny": Shape(hidden=256, layers=4, heads=4, kv_heads=2, inner=704),
    "small": Shape(hidden=512, layers=6, heads=8, kv_heads=4, inner=1408),
}
TIER_BYTES = 512 << 20
KINDS = ("plain", "ours", "builtin")
BLOCKS = {"1k": 32, "4k": 128, "16k": 512}
ROUNDS = {"1k": 5, "4k": 5, "16k": 3}
IDLE_S = 20.0
SERVED = 8  # prefixes of 2,048 tokens that are pulled from the source while it decodes
STREAMS = 4
START_S = 1200.0
ANSWER_TOKENS = 1500  # longer than the pulls take; cut short when they are over
_numbers = count(1)


@dataclass(slots=True)
class Timings:
    """TTFT in seconds by prefix length."""

    recompute_s: dict[str, list[float]] = field(default_factory=dict)
    pull_s: dict[str, list[float]] = field(default_factory=dict)
    own_s: dict[str, list[float]] = field(default_factory=dict)  # the source's own hit: nothing is faster
    first_pull_s: float = 0.0
    wrong: int = 0


def make_model(root: Path, shape: Shape) -> Path:
    family = next(one for one in FAMILIES if one.name == "llama3")
    write_family(family, root / "model")
    write_model(root / "model", bos=family.bos, eos=family.eos, shape=shape)
    return root / "model"


def transfer(kind: str, port: int, key_file: Path) -> dict[str, Any] | None:
    """--kv-transfer-config of one engine; `plain`: none."""
    if kind == "plain":
        return None
    config = connector_config(port, key_file, max_extra_ttft_s=60.0)
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = TIER_BYTES
    if kind == "builtin":
        extra["secondary_tiers"] = [{"type": "p2p", "host": "127.0.0.1", "port": port, "num_threads": 1}]
    else:
        (tier,) = extra["secondary_tiers"]
        tier |= {"type": "TimedTier", "module_path": "benchmarks.timed_tier"}
    return config


@contextlib.contextmanager
def engines(kind: str, number: int, model: Path, root: Path) -> Iterator[list[PullEngine]]:
    started = []
    more = environment(root / "site")
    try:
        for at in range(number):
            port, p2p_port = free_ports(2)
            command = arguments(model, port, transfer(kind, p2p_port, root / "key"))
            command[command.index("--max-model-len") + 1] = "20000"
            command[command.index("--num-gpu-blocks-override") + 1] = "1400"
            times = {"KVPULL_TIMES_FILE": str(root / f"{kind}-{at}.times")}
            process = processes.Process(command, root / f"{kind}-{at}.log", more | times)
            started.append(PullEngine(f"{kind}-{at}", f"http://127.0.0.1:{port}", p2p_port, process))
        for engine in started:
            engine.process.wait_ready([f"{engine.url}/health"], START_S)
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


def measure(source: PullEngine, consumer: PullEngine, lengths: Sequence[str]) -> Timings:
    timings = Timings()
    for length in ("1k", *lengths):  # the first round connects
        recompute, pull = timings.recompute_s.setdefault(length, []), timings.pull_s.setdefault(length, [])
        for _ in range(ROUNDS[length]):
            ids = prompt(next(_numbers), BLOCKS[length])
            computed_s, _ = timed(source, ids)
            source.complete(prompt(next(_numbers), 1), tokens=2)  # a step later its stores are over
            own_s, own = timed(source, ids)
            pulled_s, pulled = timed(consumer, ids, consumer.pull_from(source, str(uuid.uuid4())))
            timings.wrong += pulled != own
            recompute.append(computed_s)
            pull.append(pulled_s)
            timings.own_s.setdefault(length, []).append(own_s)
            if not timings.first_pull_s:
                timings.first_pull_s = pulled_s
                recompute.clear()
                pull.clear()
        told = ", ".join(f"{seconds:.3f}" for seconds in pull)
        print(f"{source.name} -> {consumer.name}, {length} pulled: {told} s", file=sys.stderr, flush=True)
    return timings


def scheduler_share(source: PullEngine, consumer: PullEngine, times: Path) -> dict[str, float]:
    """What our calls cost a source that decodes `STREAMS` answers and is pulled from meanwhile: shares of
    the time of its steps (which follow each other without a pause), and of its scheduler thread's CPU."""
    prefixes = [prompt(next(_numbers), 64) for _ in range(SERVED)]
    for ids in prefixes:
        source.complete(ids, tokens=1, timeout_s=600.0)
    source.complete(prompt(next(_numbers), 1), tokens=2)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [
            threads.submit(source.complete, prompt(next(_numbers), 2), tokens=ANSWER_TOKENS, timeout_s=1200.0)
            for _ in range(STREAMS)
        ]
        before = written(times)
        served = source.metric("kvpull_pull_served_bytes_total")
        for ids in prefixes:
            consumer.complete(
                ids, tokens=1, params=consumer.pull_from(source, str(uuid.uuid4())), timeout_s=600.0
            )
        after = written(times)
        assert not any(stream.done() for stream in streams), "the source was idle for a part of it"
        served = source.metric("kvpull_pull_served_bytes_total") - served
        for stream in streams:
            stream.result()
    took = {name: after[name] - before[name] for name in after}
    return {
        "scheduler_share_of_steps": took["tier_s"] / took["at_s"],
        "scheduler_share_of_thread_cpu": took["tier_s"] / took["thread_s"],
        "scheduler_us_a_step": 1e6 * took["tier_s"] / took["steps"],
        "step_ms": 1e3 * took["at_s"] / took["steps"],
        "served_meanwhile_mb": served / 1e6,
    }


def written(times: Path) -> dict[str, float]:
    """The next totals that the engine writes."""
    was = times.stat().st_mtime_ns if times.exists() else 0
    until(lambda: times.exists() and times.stat().st_mtime_ns != was)
    found: dict[str, float] = json.loads(times.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--lengths", choices=BLOCKS, nargs="+", default=list(BLOCKS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines have sessions of their own: end them
    if not processes.PYTHON.exists():
        print("no .venv-vllm here: run `make test-engine` first", file=sys.stderr)
        return 2
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        (make_site(root) / "benchmarks").symlink_to(ROOT / "benchmarks")
        (root / "key").write_bytes(KEY)
        model = make_model(root, shape)
        found: dict[str, Timings] = {}
        measures: dict[str, float] = {}
        for kind in options.kinds:
            with engines(kind, 1 if kind == "plain" else 2, model, root) as running:
                measures[f"idle_core_share_{kind}"] = idle_share(running[0])
                if kind != "plain":
                    found[kind] = measure(running[0], running[1], options.lengths)
                    measures[f"idle_connected_core_share_{kind}"] = idle_share(running[0])
                if kind == "ours":
                    measures |= scheduler_share(running[0], running[1], root / "ours-0.times")
            print(kind, found.get(kind), measures, file=sys.stderr, flush=True)
    report(found, options.lengths, shape)
    measures |= ratios(found, options.lengths) | shares(found, measures)
    print(json.dumps({name: round(value, 5) for name, value in measures.items()}))
    return 0


def report(found: Mapping[str, Timings], lengths: Sequence[str], shape: Shape) -> None:
    print(
        "   prefix   KV MB "
        + "".join(f"{kind + ': computed s':>22}{'pulled s':>10}{'own hit s':>11}" for kind in found)
    )
    for length in lengths:
        row = f"{length:>9}{BLOCKS[length] * 32 * shape.kv_bytes_per_token / 1e6:8.1f} "
        for timings in found.values():
            row += f"{statistics.median(timings.recompute_s[length]):22.3f}"
            row += f"{statistics.median(timings.pull_s[length]):10.3f}"
            row += f"{statistics.median(timings.own_s[length]):11.3f}"
        print(row)
    for kind, timings in found.items():
        print(f"{kind}: first pull of the pair (1k) {timings.first_pull_s:.3f} s,", end=" ")
        print(f"answers unlike the source's own cache hit: {timings.wrong}")


def ratios(found: Mapping[str, Timings], lengths: Sequence[str]) -> dict[str, float]:
    """Ours against the built-in tier, where both were run."""
    if not {"ours", "builtin"} <= found.keys():
        return {}
    ours, builtin = found["ours"], found["builtin"]
    told = {
        f"ttft_{length}_vs_builtin": statistics.median(ours.pull_s[length])
        / statistics.median(builtin.pull_s[length])
        for length in lengths
    }
    set_up = [one.first_pull_s - min(one.pull_s["1k"]) for one in (ours, builtin)]
    if set_up[1] > 0:
        told["session_setup_vs_builtin"] = set_up[0] / set_up[1]
    return told


def shares(found: Mapping[str, Timings], measures: Mapping[str, float]) -> dict[str, float]:
    """What is judged without the built-in tier."""
    told = {}
    if "ours" in found:
        ours = found["ours"]
        told["step_share"] = measures["scheduler_share_of_steps"]
        if "4k" in ours.pull_s:
            pulled, computed = ours.pull_s["4k"], ours.recompute_s["4k"]
            told["pull_vs_recompute_4k"] = statistics.median(pulled) / statistics.median(computed)
        if "idle_core_share_plain" in measures:
            told["idle_core_share"] = measures["idle_core_share_ours"] - measures["idle_core_share_plain"]
    return told


if __name__ == "__main__":
    sys.exit(main())
