"""`kvpull simulate`: a what-if over the user's own configuration and trace, and the committed tables.

Exit status: 0 done, 2 wrong usage or input.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the what-if on the command itself; `tables` below it."""
    add = parser.add_argument
    add("--config", type=Path, help="EndpointPickerConfig to ask about")
    add(
        "--trace",
        type=Path,
        help="Mooncake JSONL, session JSON (or a directory), llm-d-benchmark profile, or a decision ledger",
    )
    add("--model", default="gpt-oss-120b", help="a committed model, or a .json file of the same form")
    add("--engines", type=_count, default=8, help="endpoints (8)")
    add("--roles", type=_roles, default={}, metavar="prefill=2,decode=4", help="endpoints by role")
    add("--block-tokens", type=_count, default=64)
    add("--device-tokens", type=_count, default=1_000_000, help="KV tokens of one endpoint's device tier")
    add("--cpu-tokens", type=_count, default=2_000_000, help="KV tokens of one endpoint's CPU tier")
    add("--gateway", type=float, default=0.05, metavar="SECONDS", help="client to engine, without queueing")
    add("--link", type=float, default=50.0, metavar="GB/S", help="an endpoint's network link, each way")
    add("--speed", type=float, default=1.0, help="arrivals of the trace, so many times as fast")
    add("--max-think", type=float, default=10.0, metavar="SECONDS", help="longest pause in a session")
    add(
        "--max-model-len", type=_count, default=131_072, metavar="TOKENS", help="longer requests are left out"
    )
    add("--timeout", type=float, metavar="SECONDS", help="clients give up after")
    add("--max-requests", type=_count, help="only so many of the trace")
    add("--seeds", type=_count, default=3)
    add("--jobs", type=_count, default=1, help="processes")
    add("--out", type=Path, default=Path("out/simulate"), help="directory of report.html and report.json")
    parser.set_defaults(run=_what_if)
    actions = parser.add_subparsers(dest="action")
    tables = actions.add_parser("tables", help="remake the tables and plots of docs/simulation.md")
    tables.add_argument("--out", type=Path, required=True, help="directory")
    tables.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="one experiment; repeatable"
    )
    tables.add_argument("--seeds", type=_count, help="instead of what the experiments say")
    tables.add_argument("--jobs", type=_count, default=1, help="processes")
    tables.add_argument("--variants", action="store_true", help="also each assumption changed")
    tables.add_argument(
        "--keep", type=Path, metavar="FILE", help="results that have ended, to go on from after a stop"
    )
    tables.add_argument("--render", action="store_true", help="run nothing, show what --keep has")
    tables.set_defaults(run=_tables)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _roles(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and sign and count.isdigit() and int(count) for name, sign, count in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: expected roles such as prefill=2,decode=4")
    return {name: int(count) for name, _, count in pairs}


def _tables(arguments: argparse.Namespace) -> int:
    if arguments.render and not arguments.keep:
        raise ConfigError("--render needs --keep")
    from simulator.kept_results import KeptResults
    from simulator.tables import write_tables

    for path in write_tables(
        arguments.out,
        only=arguments.only,
        seeds=arguments.seeds,
        processes=arguments.jobs,
        variants=arguments.variants,
        kept=KeptResults(arguments.keep) if arguments.keep else None,
        run=not arguments.render,
    ):
        print(path)
    return 0


def _what_if(arguments: argparse.Namespace) -> int:
    if arguments.config is None or arguments.trace is None:
        raise ConfigError("simulate needs --config and --trace (or the action `tables`)")
    from simulator.page import as_html, as_json
    from simulator.runner import progress_bar
    from simulator.what_if import arm_names, collect, run_arm, verdict

    question, notes = _question(arguments)
    names = arm_names()
    jobs = [(name, seed) for name in names for seed in range(1, arguments.seeds + 1)]
    with progress_bar("what if", len(jobs)) as advance:
        results = _run_all(partial(run_arm, question), jobs, arguments.jobs, advance)
    count = arguments.seeds
    arms = [collect(name, results[i * count : (i + 1) * count]) for i, name in enumerate(names)]
    found = verdict(arms)
    inputs = _inputs(arguments) | notes
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.html").write_text(as_html(arms, found, inputs))
    (arguments.out / "report.json").write_text(as_json(arms, found, inputs))
    print(found.sentence)
    print(arguments.out / "report.html")
    return 0


def _run_all(run: Any, jobs: list[tuple[str, int]], processes: int, advance: Any) -> list[Any]:
    if processes <= 1:
        results = []
        for name, seed in jobs:
            results.append(run(name, seed))
            advance()
        return results
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run, name, seed) for name, seed in jobs]
        for future in futures:
            future.add_done_callback(lambda _: advance())
        return [future.result() for future in futures]


def _question(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from epp.config import parse_config
    from simulator.calibration import load_model
    from simulator.engine import EngineShape
    from simulator.fleet import FleetShape
    from simulator.what_if import Question

    try:
        text = arguments.config.read_text()
    except OSError as error:
        raise ConfigError(f"{arguments.config}: {error.strerror}") from error
    parse_config(text, str(arguments.config))  # refuse it before anything runs
    roles = arguments.roles
    shape = FleetShape(
        engines=sum(roles.values()) or arguments.engines,
        shape=EngineShape(arguments.block_tokens, arguments.device_tokens, arguments.cpu_tokens),
        roles=roles,
        link_bytes_per_s=arguments.link * 1e9,
        gateway_s=arguments.gateway,
    )
    client, notes = _client(arguments)
    profile = load_model(arguments.model).profile
    return Question(text, str(arguments.config), shape, profile, client), notes


def _client(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from simulator.benchmark_profile import read_profile
    from simulator.ledger_trace import is_ledger, read_ledger
    from simulator.traces import TraceReplay, fit_into, from_zero, read_trace

    if arguments.trace.name.endswith((".yaml", ".yml", ".yaml.in")):
        return read_profile(arguments.trace), {}
    notes: dict[str, Any] = {}
    if is_ledger(arguments.trace):
        ledger = read_ledger(arguments.trace, arguments.max_requests)
        requests, notes = ledger.requests, dict(ledger.notes)
    else:
        requests = read_trace(arguments.trace, arguments.max_requests)
    longest = min(arguments.max_model_len, arguments.device_tokens // 2)
    kept, dropped = fit_into(requests, longest)
    if not kept:
        raise ConfigError(f"{arguments.trace}: every request is longer than {longest:,} tokens")
    if dropped:
        print(f"kvpull: {dropped} requests longer than {longest:,} tokens are left out", file=sys.stderr)
    replay = TraceReplay(from_zero(kept), arguments.speed, arguments.timeout, arguments.max_think)
    return replay, {"requests": len(kept), "requests left out (too long)": dropped} | notes


def _inputs(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "model engines roles block_tokens device_tokens cpu_tokens gateway link speed max_think "
        "max_model_len timeout seeds"
    )
    given = {name: getattr(arguments, name) for name in names.split()}
    return {"config": arguments.config.name, "trace": arguments.trace.name} | given
