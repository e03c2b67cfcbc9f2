"""`kvpull size`: reads a config.json, prints what `epp.sizing` makes of it. Nothing is computed here."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from epp.core.pull_curves import RecomputeCurve
from epp.engine_model.timing import PRESETS
from epp.sizing.kv_layout import KV_DTYPES, KvLayout, ModelConfigError, read_layout
from epp.sizing.plan import GIB, Machine, Sizes, Workload, gib, size

_MAX_CONFIG_BYTES = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kvpull size` takes."""
    add = parser.add_argument
    add("config", type=Path, help="the model's config.json")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="the engine's --kv-cache-dtype")
    add("--context", type=_count, required=True, metavar="TOKENS", help="typical prompt")
    add("--working-set", type=_count, required=True, metavar="TOKENS", help="distinct tokens that come back")
    add("--concurrency", type=_count, required=True, help="requests at a time, all pods together")
    add("--pods", type=_count, required=True)
    add("--device-tokens", type=_count, required=True, help="the engine's log: GPU KV cache size")
    add("--tp", type=_count, default=1, help="tensor-parallel ranks of an engine")
    add("--dp", type=_count, default=1, help="engines (data-parallel ranks) in a pod")
    add("--cpu-tier-gib", type=_amount, help="of one engine; absent: sized here")
    add("--base-memory-gib", type=_amount, default=64.0, help="of a pod beside its tiers (64)")
    add("--link-gb-s", type=_amount, default=10.0, help="10^9 bytes a second between two pods (10)")
    add("--pull-floor-ms", type=_amount, default=25.0, help="of a pull of nothing, session warm (25)")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--prefill-tokens-s", type=_amount, help="of one engine: expects a crossover")
    speed.add_argument("--timing", choices=sorted(PRESETS), help="the same, by a published fit")
    add("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """0: nothing speaks against it; 1: something does. Raises ConfigError."""
    layout = _layout(arguments)
    workload = Workload(arguments.context, arguments.concurrency, arguments.working_set, arguments.pods)
    sizes = size(layout, workload, _machine(arguments))
    print(
        json.dumps(_as_json(layout, sizes)) if arguments.json else "\n".join(_lines(layout, sizes, workload))
    )
    return 1 if sizes.findings else 0


def _layout(arguments: argparse.Namespace) -> KvLayout:
    path: Path = arguments.config
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: not an object")
        return read_layout(config, kv_dtype=arguments.kv_dtype, tp_size=arguments.tp)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ModelConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON") from error


def _machine(arguments: argparse.Namespace) -> Machine:
    recompute = None
    if arguments.prefill_tokens_s:
        recompute = RecomputeCurve(0.0, 1e6 / arguments.prefill_tokens_s)
    elif arguments.timing:
        timing = PRESETS[arguments.timing]
        # the fixed part of a chunk, spread over its tokens; half a chunk is wasted on average
        recompute = RecomputeCurve(
            timing.chunk_ms / 2,
            timing.token_us + timing.chunk_ms * 1e3 / timing.chunk_tokens,
            timing.context_ns / 2,
        )
    tier = arguments.cpu_tier_gib
    return Machine(
        device_kv_tokens=arguments.device_tokens,
        engines_per_pod=arguments.dp,
        tp_size=arguments.tp,
        base_memory_bytes=round(arguments.base_memory_gib * GIB),
        cpu_tier_bytes=None if tier is None else round(tier * GIB),
        link_bytes_per_s=arguments.link_gb_s * 1e9,
        pull_floor_ms=arguments.pull_floor_ms,
        recompute=recompute,
    )


def _lines(layout: KvLayout, sizes: Sizes, workload: Workload) -> list[str]:
    lines = [
        f"KV of a token             {sizes.bytes_per_token:,.0f} B at {workload.context_tokens:,} tokens",
        f"KV of one context         {gib(sizes.context_bytes)}",
        f"device KV of an engine    {gib(sizes.device_kv_bytes)}",
        f"CPU tier of an engine     {gib(sizes.cpu_tier_bytes)} ({sizes.cpu_tier_tokens:,} tokens;"
        f" cpu_bytes_to_use: {sizes.cpu_tier_bytes})",
        f"/dev/shm of a pod         {gib(sizes.pod_shm_bytes)}",
        f"memory limit of a pod     {gib(sizes.pod_memory_bytes)}",
        f"working set               {gib(sizes.working_set_bytes)}, {sizes.working_set_ratio:.2f} times one"
        f" engine's device KV, {sizes.working_set_over_tiers:.2f} times all CPU tiers",
        f"running at a time         {gib(sizes.active_bytes)} an engine",
    ]
    if layout.window_tokens:
        lines.insert(
            1,
            f"  of it windowed layers   {layout.window_bytes_per_token:,} B for the last"
            f" {layout.window_tokens} tokens only",
        )
    if sizes.crossover_tokens is not None:
        lines.append(
            f"expected crossover        {_tokens(sizes.crossover_tokens)} (measure it: kvpull calibrate)"
        )
    lines += [f"note: {note}" for note in layout.notes]
    return lines + [f"WARNING: {finding}" for finding in sizes.findings]


def _tokens(value: float) -> str:
    return "never" if value == math.inf else f"{value:,.0f} tokens"


def _as_json(layout: KvLayout, sizes: Sizes) -> dict[str, Any]:
    values = {name: getattr(sizes, name) for name in Sizes.__slots__}
    if sizes.crossover_tokens == math.inf:
        values["crossover_tokens"] = None
    return values | {"findings": list(sizes.findings), "notes": list(layout.notes)}


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:16]) <= 10**15:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value
