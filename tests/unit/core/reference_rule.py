"""The reference's source rule written down naively from its description, as a model to compare with.

`p2p-source-producer` of llm-d-router at ebab687: of the endpoints that hold something in their CPU tier,
those within one block of the most are sampled with weight 1/(1+waiting), an absent queue length being 0;
the coordinate is FNV-1a 32 of the request id over 2^32. The one sampled is named if it is not the
computing endpoint and out-caches it (all tiers) by at least the delta.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One endpoint; depths in blocks."""

    name: str
    cpu_blocks: int
    all_blocks: int
    waiting: int | None


@dataclass(frozen=True)
class Case:
    request_id: str
    block_tokens: int
    delta_tokens: int
    computing: str
    rows: tuple[Row, ...]


def fnv_1a_32(data: bytes) -> int:
    value = 2166136261
    for byte in data:
        value = (value ^ byte) * 16777619 % 4294967296
    return value


def reference_source(case: Case) -> str | None:
    """Name of the source, or None."""
    tokens = {row.name: row.cpu_blocks * case.block_tokens for row in case.rows}
    most = max(tokens.values(), default=0)
    if most == 0:
        return None
    band = [r for r in case.rows if tokens[r.name] and tokens[r.name] + case.block_tokens >= most]
    weights = [1.0 / (1.0 + (row.waiting or 0)) for row in band]
    point = fnv_1a_32(case.request_id.encode()) / 4294967296.0 * sum(weights)
    sampled = band[-1]
    for row, weight in zip(band, weights, strict=True):
        if point < weight:
            sampled = row
            break
        point -= weight
    computing = next(row for row in case.rows if row.name == case.computing)
    gain_tokens = tokens[sampled.name] - computing.all_blocks * case.block_tokens
    return sampled.name if sampled.name != case.computing and gain_tokens >= case.delta_tokens else None


def random_case(rng: random.Random) -> Case:
    """A pool in which every clause matters now and then."""
    top = rng.randint(0, 60)
    rows = []
    for number in range(rng.randint(1, 8)):
        cpu = rng.choice((0, top, max(0, top - 1), max(0, top - 2), rng.randint(0, 60)))
        waiting = rng.choice((None, 0, 0, 1, rng.randint(0, 40)))
        rows.append(Row(f"pod-{number}", cpu, max(cpu, rng.choice((cpu, rng.randint(0, 60)))), waiting))
    return Case(
        request_id=f"{rng.getrandbits(64):016x}",
        block_tokens=rng.choice((16, 64, 128)),
        delta_tokens=rng.choice((1, 64, 1024, 2048)),
        computing=rng.choice(rows).name,
        rows=tuple(rows),
    )
