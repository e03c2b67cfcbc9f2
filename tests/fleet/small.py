"""A fleet of small engines that computes fast: for prompts of some thousand tokens."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.local.fleet import Fleet
from deploy.local.ports import AddressPlan
from deploy.local.spec import FleetSpec
from epp import cli

LOAD_ANSWER_TOKENS = 15_000  # long enough to outlast what is asked meanwhile
TIME_SCALE = 0.2  # model time runs five times as fast: nothing here is judged by time


def small_spec(
    out_dir: Path, block: str, offset: int, variants: Mapping[str, Mapping[str, Any]] | None = None
) -> FleetSpec:
    return FleetSpec(
        AddressPlan(block, offset),
        out_dir=out_dir,
        time_scale=TIME_SCALE,
        device_tier_tokens=64 * 1024,
        cpu_tier_tokens=64 * 1024,
        variants=variants or {},
    )


async def kvpull(fleet: Fleet, *arguments: str) -> int:
    """A command for operators against the fleet's picker, in a thread: it blocks."""
    url = f"http://127.0.0.1:{fleet.spec.addresses.control.metrics_port}"
    asking = ("--url", url, "--token-file", str(fleet.debug_token_file), "--timeout", "20")
    return await asyncio.to_thread(cli.main, (*arguments, *asking))


async def doctor(fleet: Fleet, *arguments: str, key_file: Path | None = None) -> int:
    """`kvpull doctor` with everything it can be given; `key_file` instead of the fleet's routing key."""
    return await kvpull(
        fleet,
        "doctor",
        *("--gateway", fleet.gateway_url),
        *("--sidecar-metrics-port", str(fleet.spec.addresses.engine(1, "any").sidecar_metrics_port)),
        *("--routing-key-file", str(key_file or fleet.routing_key_file)),
        *("--settle", "30", "--request-timeout", "60"),  # a loaded machine; nothing waits without need
        *arguments,
    )


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """What is printed inside the block. For commands that a fixture runs: it has no `capsys`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield text
