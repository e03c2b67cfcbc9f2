"""Builders of candidates for tests of the core."""

from __future__ import annotations

import random

from engine_plugin.identity import EndpointId
from epp.core.types import (
    Candidate,
    ClaimState,
    Endpoint,
    EndpointMetrics,
    EngineInfo,
    InflightLoad,
    PrefixMatch,
    ScheduleContext,
    SchedulingRequest,
)

BLOCK = 16


def endpoint(
    pod: str, *, draining: bool = False, role: str | None = None, source_class: str | None = None
) -> Endpoint:
    labels = {"llm-d.ai/role": role} if role else {}
    if source_class:
        labels["kvpull/source-class"] = source_class
    return Endpoint(EndpointId(pod), f"10.0.0.{sum(map(ord, pod)) % 250}", 8000, labels, draining)


def info(**changed: object) -> EngineInfo:
    values: dict[str, object] = {
        "instance": "i",
        "block_size_tokens": BLOCK,
        "hash_algo": "sha256",
        "seed_fp": "s",
        "model_fp": "m",
        "layout_fp": "l",
        "protocol": "1",
    }
    values.update(changed)
    return EngineInfo(**values)  # type: ignore[arg-type]


def candidate(
    pod: str,
    *,
    blocks: int = 0,
    cpu: int | None = None,
    device: int | None = None,
    state: ClaimState = ClaimState.LIVE,
    waiting: float | None = 0.0,
    usage: float | None = 0.0,
    engine: EngineInfo | None = None,
    draining: bool = False,
    requests: int = 0,
    role: str | None = None,
    pulls: int = 0,
    source_class: str | None = None,
    block_tokens: int = BLOCK,
) -> Candidate:
    return Candidate(
        endpoint(pod, draining=draining, role=role, source_class=source_class),
        EndpointMetrics(0.0, waiting, 0.0, usage, block_tokens, engine),
        InflightLoad(requests=requests, pulls_served=pulls),
        PrefixMatch(
            state, blocks, blocks if device is None else device, blocks if cpu is None else cpu, block_tokens
        ),
    )


def request(request_id: str = "r", tokens: int | None = 4096, model: str = "m") -> SchedulingRequest:
    return SchedulingRequest(request_id, model, None if tokens is None else range(tokens))


def context(req: SchedulingRequest | None = None) -> ScheduleContext:
    req = req or request()
    return ScheduleContext(req, 0.0, random.Random(req.request_id))
