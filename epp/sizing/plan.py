"""From bytes a token to tiers, shared memory and pods, and what would make them useless. Pure.

Rules of thumb are the reference guide's: a CPU tier of about twice the device's KV; /dev/shm above all
tiers of a pod together; a working set of at least twice one pod's cache before pulls pay steadily; at most
64 GiB of tier a rank on one UCX stack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epp.core.pull_curves import PullCurve, RecomputeCurve, crossover_tokens
from epp.sizing.kv_layout import KvLayout

GIB = 1 << 30
TIER_OVER_DEVICE = 2.0
SHM_OVER_TIERS = 12 / 11  # the guide's 96 GiB for 88 GiB
STEP_BYTES = GIB  # sizes are rounded up to this
MAX_RANK_TIER_BYTES = 64 * GIB
TRANSIENT_RATIO, SUSTAINED_RATIO = 1.0, 2.0
DEFAULT_FLOOR_MS = 25.0  # of a warm pull over RDMA, as published for gpt-oss-120b and Llama-3.1-8B


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served. `working_set_tokens`: distinct prefix tokens that come back."""

    context_tokens: int
    concurrency: int  # requests at a time, all pods together
    working_set_tokens: int
    pods: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One pod. `cpu_tier_bytes` of one engine; None: as the rule says."""

    device_kv_tokens: int  # "GPU KV cache size" in the engine's log, of one engine
    engines_per_pod: int = 1  # data-parallel ranks
    tp_size: int = 1
    base_memory_bytes: int = 64 * GIB  # of a pod beside its tiers
    cpu_tier_bytes: int | None = None
    link_bytes_per_s: float = 10e9
    pull_floor_ms: float = DEFAULT_FLOOR_MS
    recompute: RecomputeCurve | None = None  # None: no crossover is expected of us


@dataclass(frozen=True, slots=True)
class Sizes:
    """The answer. Bytes of one engine unless the name says pod."""

    bytes_per_token: float  # at this context
    context_bytes: int
    device_kv_bytes: int
    cpu_tier_bytes: int
    cpu_tier_tokens: int
    pod_shm_bytes: int
    pod_memory_bytes: int
    working_set_bytes: int
    working_set_ratio: float  # over one engine's device KV
    working_set_over_tiers: float  # over all CPU tiers together
    active_bytes: int  # of the requests that run at a time, an engine's share
    crossover_tokens: float | None
    findings: tuple[str, ...]  # sentences; empty: nothing speaks against it


def size(layout: KvLayout, workload: Workload, machine: Machine) -> Sizes:
    """Size tiers and pods for a workload, and say what will not help."""
    per_token = layout.effective_bytes_per_token(workload.context_tokens)
    device_bytes = round(machine.device_kv_tokens * per_token)
    tier_bytes = machine.cpu_tier_bytes
    if tier_bytes is None:
        tier_bytes = _up(TIER_OVER_DEVICE * device_bytes)
    tiers_bytes = tier_bytes * machine.engines_per_pod
    shm_bytes = _up(tiers_bytes * SHM_OVER_TIERS)
    engines = workload.pods * machine.engines_per_pod
    set_bytes = round(workload.working_set_tokens * per_token)
    context_bytes = layout.sequence_bytes(workload.context_tokens)
    sizes = Sizes(
        bytes_per_token=per_token,
        context_bytes=context_bytes,
        device_kv_bytes=device_bytes,
        cpu_tier_bytes=tier_bytes,
        cpu_tier_tokens=int(tier_bytes / per_token),
        pod_shm_bytes=shm_bytes,
        pod_memory_bytes=_up(shm_bytes + machine.base_memory_bytes),
        working_set_bytes=set_bytes,
        working_set_ratio=workload.working_set_tokens / machine.device_kv_tokens,
        working_set_over_tiers=set_bytes / (tier_bytes * engines) if tier_bytes else math.inf,
        active_bytes=math.ceil(workload.concurrency / engines) * context_bytes,
        crossover_tokens=_crossover(per_token, machine),
        findings=(),
    )
    return _with_findings(sizes, workload, machine)


def _crossover(per_token: float, machine: Machine) -> float | None:
    if machine.recompute is None:
        return None
    token_us = per_token / machine.link_bytes_per_s * 1e6
    return crossover_tokens(machine.recompute, PullCurve(machine.pull_floor_ms, token_us))


def _with_findings(sizes: Sizes, workload: Workload, machine: Machine) -> Sizes:
    values = {name: getattr(sizes, name) for name in Sizes.__slots__}
    values["findings"] = tuple(
        sentence
        for sentence in (
            *_tier_findings(sizes, workload, machine),
            *_set_findings(sizes, workload),
            _crossover_finding(sizes, workload),
        )
        if sentence
    )
    return Sizes(**values)


def _tier_findings(sizes: Sizes, workload: Workload, machine: Machine) -> list[str]:
    found = []
    if sizes.cpu_tier_bytes < sizes.context_bytes:
        found.append(
            f"the CPU tier ({gib(sizes.cpu_tier_bytes)}) is smaller than the KV of one context"
            f" ({gib(sizes.context_bytes)}): no peer can ever serve a whole prefix"
        )
    elif sizes.cpu_tier_bytes < sizes.device_kv_bytes:
        found.append(
            f"the CPU tier ({gib(sizes.cpu_tier_bytes)}) is smaller than the device's KV"
            f" ({gib(sizes.device_kv_bytes)}): it forgets what the device still has, peers can pull only from"
            " the CPU tier, and every look-up that misses costs 3-5 % of a cold first token"
        )
    if sizes.working_set_over_tiers > 1.0:
        found.append(
            f"the working set ({gib(sizes.working_set_bytes)}) is {sizes.working_set_over_tiers:.1f} times"
            " all CPU tiers together: prefixes are evicted before they come back"
        )
    if sizes.cpu_tier_bytes / machine.tp_size > MAX_RANK_TIER_BYTES:
        found.append(
            f"more than {gib(MAX_RANK_TIER_BYTES)} of CPU tier a rank: one UCX stack was seen"
            " to crash at 96 GiB"
        )
    if sizes.active_bytes > sizes.device_kv_bytes:
        found.append(
            f"{workload.concurrency} requests at a time need {gib(sizes.active_bytes)} of KV on each engine,"
            f" which has {gib(sizes.device_kv_bytes)}: they will queue or be preempted"
        )
    return found


def _set_findings(sizes: Sizes, workload: Workload) -> list[str]:
    if workload.pods < 2:
        return ["one pod: there is no peer to pull from"]
    if sizes.working_set_ratio <= TRANSIENT_RATIO:
        return [
            f"the working set is {sizes.working_set_ratio:.2f} of one engine's cache: each engine will"
            " soon hold all of it, and pulls help only while they warm up"
        ]
    if sizes.working_set_ratio < SUSTAINED_RATIO:
        return [
            f"the working set is {sizes.working_set_ratio:.2f} times one engine's cache: expect a passing"
            f" gain (a lasting one was seen from {SUSTAINED_RATIO:g} times on)"
        ]
    return []


def _crossover_finding(sizes: Sizes, workload: Workload) -> str | None:
    if sizes.crossover_tokens is None or sizes.crossover_tokens < workload.context_tokens:
        return None
    if sizes.crossover_tokens == math.inf:
        return "a pull is never cheaper than recomputing on this link: leave pulls off"
    return (
        f"the expected crossover ({sizes.crossover_tokens:,.0f} tokens) is not below the context"
        f" ({workload.context_tokens:,}): pulls will not pay"
    )


def gib(count_bytes: float) -> str:
    """Bytes for people."""
    return f"{count_bytes / GIB:,.2f} GiB"


def _up(count_bytes: float) -> int:
    return math.ceil(count_bytes / STEP_BYTES) * STEP_BYTES
