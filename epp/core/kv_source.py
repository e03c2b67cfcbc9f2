"""The source rule: may the computing endpoint pull this prompt's prefix, and from whom?

One pure function. Semantics: llm-d-router `p2p-source-producer` at ebab687 (band, weights, sampling
coordinate, delta), plus: a holder must have a claim, must not be draining, and must not be known
incompatible with the computing endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_plugin.identity import EndpointId
from epp.core.thresholds import SourcePolicy
from epp.core.types import Candidate, KvSource, SchedulingRequest, SourceChoice, SourceReason

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193


def sampling_coordinate(request_id: str) -> float:
    """Where in [0, 1) a request samples: FNV-1a 32 of its id. The same id samples the same place,
    so a decision can be replayed and compared with the reference's."""
    value = _FNV_OFFSET
    for byte in request_id.encode():
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value / 2**32


def choose_source(
    request: SchedulingRequest,
    candidates: Sequence[Candidate],
    computing: Candidate,
    policy: SourcePolicy,
) -> SourceChoice:
    """Decide whether a peer is named for `request`, computed on `computing`.

    `candidates` may contain `computing`: it takes part in the band, as in the reference, and when it
    is sampled nobody is named. Cases, in the order they are tested:

    1 no producer / switched off / no threshold    -> NOT_CONFIGURED, SWITCHED_OFF
    2 prompt not tokenised                         -> NO_TOKENS
    3 nobody's cache is known                      -> NO_CLAIM
    4 the computing endpoint's cache is not known  -> DESTINATION_UNKNOWN
    5 no servable block anywhere                   -> NO_HOLDER (or INCOMPATIBLE, UNVERIFIED)
    6 the sampled holder is the computing endpoint -> LOCAL_BEST
    7 it gains less than the delta                 -> BELOW_DELTA (speculative blocks count at the
                                                      computing endpoint, never at a holder)
    8                                              -> PULL
    """
    if not policy.configured:
        return SourceChoice(None, SourceReason.NOT_CONFIGURED)
    delta = policy.min_cached_token_delta
    if not policy.enabled or delta is None:
        return SourceChoice(None, SourceReason.SWITCHED_OFF)
    if request.token_ids is None:
        return SourceChoice(None, SourceReason.NO_TOKENS, (), delta)
    if not any(c.match.state.has_claim for c in candidates):
        return SourceChoice(None, SourceReason.NO_CLAIM, (), delta)
    if not computing.match.state.has_claim:
        return SourceChoice(None, SourceReason.DESTINATION_UNKNOWN, (), delta)
    holders, refused = _holders(candidates, computing, policy)
    if not holders:
        return SourceChoice(None, refused or SourceReason.NO_HOLDER, (), delta)
    band = _band(holders)
    weights = [_weight(c) for c in band]
    considered = tuple(
        (c.endpoint.id, c.match.servable_tokens, w) for c, w in zip(band, weights, strict=True)
    )
    chosen = _sample(band, weights, sampling_coordinate(request.request_id))
    if chosen.endpoint.id == computing.endpoint.id:
        return SourceChoice(None, SourceReason.LOCAL_BEST, considered, delta)
    # what another request is bringing there counts: a second pull would move the same bytes again
    gain_tokens = chosen.match.servable_tokens - computing.match.expected_tokens
    if gain_tokens < delta:
        return SourceChoice(None, SourceReason.BELOW_DELTA, considered, delta)
    source = KvSource(chosen.endpoint, chosen.match.servable_tokens, gain_tokens)
    return SourceChoice(source, SourceReason.PULL, considered, delta)


def _holders(
    candidates: Sequence[Candidate], computing: Candidate, policy: SourcePolicy
) -> tuple[list[Candidate], SourceReason | None]:
    """Candidates that could serve a pull, and why the last refused one could not."""
    holders: list[Candidate] = []
    refused: SourceReason | None = None
    for candidate in candidates:
        if candidate.match.servable_tokens <= 0 or candidate.endpoint.draining:
            continue
        reason = _refusal(candidate, computing, policy)
        if reason is None:
            holders.append(candidate)
        else:
            refused = reason
    return holders, refused


def _refusal(candidate: Candidate, computing: Candidate, policy: SourcePolicy) -> SourceReason | None:
    if candidate.endpoint.id == computing.endpoint.id:
        return None
    theirs, ours = candidate.metrics.info, computing.metrics.info
    if theirs is None or ours is None:  # unverified: named as the reference would, unless refused
        return SourceReason.UNVERIFIED if policy.require_verified else None
    return SourceReason.INCOMPATIBLE if ours.mismatch(theirs) else None


def _band(holders: Sequence[Candidate]) -> list[Candidate]:
    """Holders within one block of the best, in endpoint order."""
    best_tokens = max(c.match.servable_tokens for c in holders)
    kept = [c for c in holders if c.match.servable_tokens + c.match.block_size_tokens >= best_tokens]
    kept.sort(key=_endpoint_id)
    return kept


def _endpoint_id(candidate: Candidate) -> EndpointId:
    return candidate.endpoint.id


def _weight(candidate: Candidate) -> float:
    """1/(1+waiting). Unknown counts as 0 waiting, as in the reference: refusing a holder because its
    scrape is late would recompute seconds of prefill to save one bad guess."""
    return 1.0 / (1.0 + (candidate.metrics.waiting_requests or 0.0))


def _sample(band: Sequence[Candidate], weights: Sequence[float], coordinate: float) -> Candidate:
    target = coordinate * sum(weights)
    reached = 0.0
    for candidate, weight in zip(band, weights, strict=True):
        reached += weight
        if target < reached:
            return candidate
    return band[-1]
