"""Commands of the local fleet.

Exit status: 0 everything as expected (`up`: ended by Ctrl-C), 1 a row came out otherwise, 2 the fleet
cannot start, a part of it failed or the scenario cannot go on, 130 the demo was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.errors import FleetError
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.ports import DEFAULT_BLOCK, AddressPlan
from deploy.local.report import Reporter, write_json
from deploy.local.scenario.run import Result, run_scenario
from deploy.local.spec import FleetSpec
from deploy.local.vllm.parts import VllmFleet, VllmFleetSpec, vllm_spec
from deploy.local.vllm.run import run_on_vllm
from deploy.local.welcome import welcome

OK, UNEXPECTED, CANNOT_START, INTERRUPTED = 0, 1, 2, 130
T = TypeVar("T")


class _Interrupted(Exception):
    """SIGINT or SIGTERM."""


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    report = Reporter()
    try:
        spec = _spec(arguments)
        kind = VllmFleet if isinstance(spec, VllmFleetSpec) else Fleet
        command = (_demo if arguments.command == "demo" else _up)(spec, report, kind)
        return asyncio.run(_interruptible(command))
    except _Interrupted:
        return OK if arguments.command == "up" else INTERRUPTED
    except FleetError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.local", description="A whole kvpull fleet on this machine."
    )
    parser.add_argument(
        "command", choices=("demo", "up"), help="run the scenario, or leave the fleet running"
    )
    parser.add_argument(
        "--engine",
        choices=("emulated", "vllm"),
        default="emulated",
        help="vllm: real vLLM engines on the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--address-block",
        default=DEFAULT_BLOCK,
        metavar="127.X.Y",
        help="engine n listens on address n of this block (default: %(default)s)",
    )
    parser.add_argument(
        "--port-offset", type=int, default=0, metavar="N", help="added to every port (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for logs, generated files and demo.json (default: out)"
    )
    parser.add_argument(
        "--cpu-tier-tokens", type=int, metavar="N", help="size of an engine's CPU tier, in tokens"
    )
    return parser


def _spec(arguments: argparse.Namespace) -> FleetSpec:
    addresses = AddressPlan(arguments.address_block, arguments.port_offset)
    spec = FleetSpec(addresses)
    if arguments.engine == "vllm":
        spec = vllm_spec(addresses, spec.out_dir)
    if arguments.out is not None:
        spec = replace(spec, out_dir=arguments.out.resolve())
    if arguments.cpu_tier_tokens is not None:
        spec = replace(spec, cpu_tier_tokens=arguments.cpu_tier_tokens)
    return spec


async def _demo(spec: FleetSpec, report: Reporter, kind: type[Fleet]) -> int:
    """Start, run the scenario, stop, print and write the result."""
    async with running_fleet(spec, report.progress, kind) as fleet:
        result = await scenario_on(fleet, report, judge_ttft=True)
    path = spec.out_dir / "demo.json"
    write_json(path, result.rows, result.checks)
    report.result(result.rows, result.checks)
    report.say(f"Written to {path}")
    return OK if result.as_expected else UNEXPECTED


async def _up(spec: FleetSpec, report: Reporter, kind: type[Fleet]) -> int:
    """Start, say how to use it, run until interrupted or until a part fails."""
    async with running_fleet(spec, report.progress, kind) as fleet:
        report.say(welcome(fleet))
        raise await fleet.failure()


async def scenario_on(fleet: Fleet, report: Reporter, *, judge_ttft: bool) -> Result:
    """The scenario's result.

    Raises:
        FleetError: a part failed meanwhile, or the scenario cannot go on.
    """
    if isinstance(fleet, VllmFleet):
        return await _unless(fleet.failure(), run_on_vllm(fleet, report, judge_ttft=judge_ttft))
    return await _unless(fleet.failure(), run_scenario(fleet, report, judge_ttft=judge_ttft))


async def _unless(failure: Coroutine[Any, Any, FleetError], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless `failure` comes first: then that is raised."""
    working, failing = asyncio.ensure_future(work), asyncio.ensure_future(failure)
    try:
        await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        return working.result()
    finally:
        working.cancel()
        failing.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


async def _interruptible(command: Coroutine[Any, Any, int]) -> int:
    """Run a command; SIGINT and SIGTERM cancel it, so that it stops the fleet on its way out."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise _Interrupted from None
