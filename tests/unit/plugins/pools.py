"""Candidates whose load and placements can be set, for tests of plugins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from epp.core.types import (
    Candidate,
    ClaimState,
    InflightLoad,
    LoraState,
    PrefixMatch,
    ScheduleContext,
    SchedulingRequest,
)
from tests.unit.core.rows import BLOCK, candidate

TOKENS = 1600  # 100 blocks


def asked(
    request_id: str = "r",
    *,
    headers: Mapping[str, str] | None = None,
    lora: str | None = None,
    now_s: float = 0.0,
    tokens: int | None = TOKENS,
    pieces: int | None = None,
) -> ScheduleContext:
    request = SchedulingRequest(
        request_id,
        "m",
        None if tokens is None else range(tokens),
        lora_name=lora,
        headers=headers or {},
        pieces=None if pieces is None else range(pieces),
    )
    return ScheduleContext(request, now_s, random.Random(request_id))


def loaded(pod: str, *, tokens: int = 0, requests: int = 0, blocks: int = 0, known: bool = True) -> Candidate:
    state = ClaimState.LIVE if known else ClaimState.UNKNOWN
    row = candidate(pod, blocks=blocks, state=state)
    return row._replace(load=InflightLoad(requests, tokens))


def placed(pod: str, blocks: int) -> Candidate:
    """Known by placements alone."""
    match = PrefixMatch(ClaimState.LIVE, blocks, blocks, 0, BLOCK)
    return candidate(pod, state=ClaimState.UNKNOWN)._replace(placed=match)


def with_loras(pod: str, loras: LoraState | None) -> Candidate:
    row = candidate(pod)
    return row._replace(metrics=replace(row.metrics, loras=loras))


def labelled(pod: str, **labels: str) -> Candidate:
    """Underscores stand for what label names have instead: `zone` -> topology.kubernetes.io/zone."""
    names = {"host": "kubernetes.io/hostname"}
    full = {names.get(k, f"topology.kubernetes.io/{k}"): v for k, v in labels.items()}
    row = candidate(pod)
    return row._replace(endpoint=replace(row.endpoint, labels=full))


def pods(rows: object) -> list[str]:
    return [row.endpoint.id.pod for row in rows]  # type: ignore[attr-defined]
