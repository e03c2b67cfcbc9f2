"""Passes over all the rows of a decision, in Python: what `_compiled_columns` has to agree with.

A decision over a thousand endpoints is a few of these. Pure; which of the two runs: `columns`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from engine_plugin.identity import EndpointId
from epp.core.index_interface import Depths
from epp.core.types import (
    NO_MATCH,
    Candidate,
    ClaimState,
    Endpoint,
    EndpointMetrics,
    InflightLoad,
    PrefixMatch,
)
from epp.core.view_state import Standing

_NO_DEPTHS = Depths()
_LIVE, _PARTIAL = ClaimState.LIVE, ClaimState.PARTIAL


def match_rows(
    endpoints: Sequence[EndpointId],
    standings: Sequence[Standing],
    depths: Mapping[EndpointId, Depths],
    expected: Mapping[EndpointId, int],
) -> dict[EndpointId, PrefixMatch]:
    """How much of one prompt each holds, in the order of `endpoints`; `expected`: blocks on their way."""
    matches: dict[EndpointId, PrefixMatch] = {}
    new, get = tuple.__new__, depths.get
    for endpoint, (state, block_size_tokens, from_empty, _) in zip(endpoints, standings, strict=True):
        if state is None:
            matches[endpoint] = NO_MATCH
            continue
        blocks, device, cpu = get(endpoint, _NO_DEPTHS)
        more = expected.get(endpoint, 0) if expected else 0
        matches[endpoint] = new(
            PrefixMatch, (state, blocks, device, cpu, block_size_tokens, from_empty, more)
        )
    return matches


def candidate_rows(
    endpoints: Sequence[Endpoint],
    metrics: Sequence[EndpointMetrics],
    loads: Sequence[InflightLoad],
    matches: Iterable[PrefixMatch],
    placed: Sequence[PrefixMatch] | None,
) -> list[Candidate]:
    """One row an endpoint; `placed` None: nothing is concluded from placements."""
    guesses = [NO_MATCH] * len(endpoints) if placed is None else placed
    return list(map(Candidate, endpoints, metrics, loads, matches, guesses))


def matched_shares(
    matches: Sequence[PrefixMatch], prompt_tokens: int, on_device: float, on_cpu: float
) -> list[float | None]:
    """Tier-weighted share of the prompt's whole blocks, of each; None: not known.

    Blocks beyond the device prefix count with the CPU weight, so a device block behind a hole
    counts as CPU: the index reports prefixes, not maps. Speculative blocks beyond those count as
    device blocks: that is where they are being computed.
    """
    shares: list[float | None] = []
    for state, blocks, device, _, size, _, speculative in matches:
        if not state.has_claim:
            shares.append(None)
            continue
        total_blocks = prompt_tokens // size if size else 0
        if not total_blocks:
            shares.append(0.0)
            continue
        beyond = blocks - device
        near = speculative - beyond if speculative > blocks else device
        shares.append((near * on_device + beyond * on_cpu) / total_blocks)
    return shares


def servable_tokens(candidates: Sequence[Candidate]) -> list[int]:
    """`PrefixMatch.servable_tokens` of each, without a call for each of a thousand."""
    return [
        m.cpu_blocks * m.block_size_tokens if m.state is _LIVE or m.state is _PARTIAL else 0
        for m in [c.match for c in candidates]
    ]


def add_weighted(
    totals: Sequence[float], scores: Sequence[float], weight: float
) -> tuple[Sequence[float], list[float]]:
    """Scores brought into [0, 1], what is no number as 0; and totals with `weight` times those added."""
    kept = _bounded(scores)
    return kept, [total + weight * score for total, score in zip(totals, kept, strict=True)]


def _bounded(scores: Sequence[float]) -> Sequence[float]:
    """Nearly always there is nothing to mend."""
    if math.isfinite(sum(scores)) and min(scores) >= 0.0 and max(scores) <= 1.0:
        return scores
    return [min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0 for score in scores]


def largest(values: Sequence[float], count: int) -> list[int]:
    """Places of the `count` (64 at most) largest values, largest first; of equal ones the first."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count]


def within_reach(candidates: Sequence[Candidate], depths: Sequence[int], best: int) -> list[int]:
    """Places of those that hold `best` tokens, or less than that by one block of their own at most."""
    return [
        i
        for i, (depth, candidate) in enumerate(zip(depths, candidates, strict=True))
        if depth == best or 0 < depth < best <= depth + candidate.match.block_size_tokens
    ]
