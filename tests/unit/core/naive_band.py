"""Who may be sampled, said plainly: every holder is judged by itself, then the band is cut.

What `epp.core.source_band` does in one loop over a thousand candidates must come to this.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_plugin.identity import EndpointId
from epp.core.thresholds import MODE_COST, SOURCE_CLASS_LABEL, SourcePolicy
from epp.core.types import Candidate, SourceReason

Refused = tuple[EndpointId, SourceReason]
Sampled = tuple[EndpointId, float]


def naive_band(
    rows: Sequence[Candidate], computing: Candidate, policy: SourcePolicy, refused_peers: frozenset[str]
) -> tuple[list[Sampled], list[Refused]]:
    """The band with its weights, in the order given; and who of that depth was passed over, deepest first."""
    kept: list[tuple[Candidate, SourcePolicy]] = []
    refused: list[tuple[int, EndpointId, SourceReason]] = []
    for row in rows:
        depth = row.match.servable_tokens
        if not depth:
            continue
        terms = policy.of_class(row.endpoint.labels.get(SOURCE_CLASS_LABEL)) if policy.by_class else policy
        reason = _refusal(row, computing, policy, terms, refused_peers)
        if reason is None:
            kept.append((row, terms))
        else:
            refused.append((-depth, row.endpoint.id, reason))
    best = max((row.match.servable_tokens for row, _ in kept), default=0)
    band = [
        (row.endpoint.id, _weight(row, terms))
        for row, terms in kept
        if row.match.servable_tokens + row.match.block_size_tokens >= best
    ]
    sizes = {row.endpoint.id: row.match.block_size_tokens for row in rows}
    refused.sort(key=lambda row: row[:2])
    return band, [(who, why) for depth, who, why in refused if sizes[who] - depth >= best]


def _weight(row: Candidate, terms: SourcePolicy) -> float:
    served = row.load.pulls_served if terms.inflight_awareness else 0
    return 1.0 / (1.0 + (row.metrics.waiting_requests or 0.0) + served)


def _refusal(
    row: Candidate,
    computing: Candidate,
    policy: SourcePolicy,
    terms: SourcePolicy,
    refused_peers: frozenset[str],
) -> SourceReason | None:
    ours, info = computing.metrics.info, row.metrics.info
    names = {row.endpoint.p2p_address, *((info.instance, info.p2p_addr) if info else ())} - {""}
    gain = row.match.servable_tokens - computing.match.expected_tokens
    own_delta = terms.min_cached_token_delta != policy.min_cached_token_delta and terms.mode != MODE_COST
    if row.endpoint.id == computing.endpoint.id:
        return None
    if row.endpoint.draining:
        return SourceReason.DRAINING
    if policy.by_class and not terms.enabled:
        return SourceReason.SWITCHED_OFF
    if policy.by_class and terms.min_cached_token_delta is None:
        return SourceReason.NO_THRESHOLD
    if policy.by_class and own_delta and gain < (terms.min_cached_token_delta or 0):
        return SourceReason.BELOW_DELTA
    if (info is None or ours is None) and terms.require_verified:
        return SourceReason.UNVERIFIED
    if info is not None and ours is not None and info.mismatch(ours):
        return SourceReason.INCOMPATIBLE
    if names & refused_peers:
        return SourceReason.PEER_REFUSED
    limit = terms.max_inflight_pulls
    return SourceReason.OVER_LIMIT if limit is not None and row.load.pulls_served >= limit else None
