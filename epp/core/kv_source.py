"""The source rule: may the computing endpoint pull this prompt's prefix, and from whom?

One pure function. Semantics: llm-d-router `p2p-source-producer` at ebab687 (CPU prefix, band, weights,
sampling coordinate, delta, never itself); with `inflight_awareness` off and no holder refused it names
exactly what the reference names for the same list of endpoints (here always in the order of their
ids). Ours on top: a holder must have a claim, must not drain, must not be known incompatible or to
have been refused, and must have room for one more pull. It does not learn, log or remember.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epp.core.columns import largest, servable_tokens
from epp.core.pull_curves import PullPrediction
from epp.core.source_band import Selection
from epp.core.thresholds import MODE_COST, SourcePolicy
from epp.core.types import (
    MAX_RECORDED,
    Candidate,
    KvSource,
    SchedulingRequest,
    SourceChoice,
    SourceReason,
)

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193
# decided without a look at the holders; where pulls are off, a replay still wants to know them
_UNSEEN = (SourceReason.NOT_CONFIGURED, SourceReason.NO_TOKENS, SourceReason.NO_CLAIM)
# (source, computing, gain in tokens, terms of the source) -> what is known of the two costs
Pricing = Callable[[Candidate, Candidate, int, SourcePolicy], PullPrediction | None]


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
    refused_peers: frozenset[str] = frozenset(),
    pricing: Pricing | None = None,
) -> SourceChoice:
    """Decide whether a peer is named for `request`, computed on `computing`.

    `candidates` come in the order of their ids, which is the order they are sampled in; they may
    contain `computing`: it takes part in the band, as in the reference, and when it
    is sampled nobody is named. `refused_peers`: instances and p2p addresses that the computing engine
    reports to have refused. Cases, in the order they are tested:

    1 no producer / switched off / no threshold    -> NOT_CONFIGURED, SWITCHED_OFF, NO_THRESHOLD
    2 prompt not tokenised                         -> NO_TOKENS
    3 nobody's cache is known                      -> NO_CLAIM
    4 the computing endpoint's cache is not known  -> DESTINATION_UNKNOWN
    5 no servable block anywhere                   -> NO_HOLDER
    6 every holder is refused                      -> the reason of the deepest one
    7 the sampled holder is the computing endpoint -> LOCAL_BEST
    8 it gains less than the delta                 -> BELOW_DELTA (speculative blocks count at the
                                                      computing endpoint, never at a holder)
      or, in cost mode where `pricing` is sure: pulling is not cheaper -> NOT_CHEAPER
    9                                              -> PULL

    What `pricing` says is recorded in either mode, beside what the threshold says.
    """
    delta, generation = policy.min_cached_token_delta, policy.generation
    reason = _why_not_at_all(request, candidates, computing, policy)
    if reason in _UNSEEN:
        return SourceChoice(None, reason, (), delta, generation)
    depths = servable_tokens(candidates)
    holders_total = len(depths) - depths.count(0)
    if reason is not None or not holders_total:
        reason = reason or SourceReason.NO_HOLDER
        holders = _deepest(candidates, depths) if holders_total else ()
        return SourceChoice(None, reason, (), delta, generation, 0, (), holders, holders_total)
    holders = _deepest(candidates, depths)
    selection = Selection(candidates, depths, computing, policy, refused_peers)
    band = selection.band()
    refused = selection.refused
    if not band.rows:
        return SourceChoice(None, refused[0][1], (), delta, generation, 0, refused, holders, holders_total)
    sampled = _sample(band.weights, sampling_coordinate(request.request_id))
    chosen = band.rows[sampled]
    terms = selection.terms(chosen)
    source, reason, predicted, by_cost = _judge(chosen, computing, terms, pricing)
    considered = tuple(
        (band.rows[i].endpoint.id, band.rows[i].match.servable_tokens, band.weights[i])
        for i in _window(sampled, len(band.rows))
    )
    return SourceChoice(
        source,
        reason,
        considered,
        terms.min_cached_token_delta or 0,
        generation,
        len(band.rows),
        refused,
        holders,
        holders_total,
        predicted,
        by_cost,
    )


def _judge(
    chosen: Candidate, computing: Candidate, terms: SourcePolicy, pricing: Pricing | None
) -> tuple[KvSource | None, SourceReason, PullPrediction | None, bool]:
    """Cases 7 to 9 for the sampled holder: the source or None, why, what is predicted, and whether that
    decided."""
    if chosen.endpoint.id == computing.endpoint.id:
        return None, SourceReason.LOCAL_BEST, None, False
    servable = chosen.match.servable_tokens
    # what another request is bringing there counts: a second pull would move the same bytes again
    gain_tokens = servable - computing.match.expected_tokens
    predicted = None
    if pricing is not None and gain_tokens > 0:
        predicted = pricing(chosen, computing, gain_tokens, terms)
    by_cost = terms.mode == MODE_COST and predicted is not None and predicted.sure
    reason = _verdict(gain_tokens, terms.min_cached_token_delta or 0, predicted if by_cost else None)
    if reason is not SourceReason.PULL:
        return None, reason, predicted, by_cost
    verified = chosen.metrics.info is not None and computing.metrics.info is not None
    return KvSource(chosen.endpoint, servable, gain_tokens, verified), reason, predicted, by_cost


def _verdict(gain_tokens: int, delta: int, predicted: PullPrediction | None) -> SourceReason:
    """Threshold, or cost where it is given."""
    if predicted is not None:
        return SourceReason.PULL if predicted.cheaper else SourceReason.NOT_CHEAPER
    return SourceReason.BELOW_DELTA if gain_tokens < delta else SourceReason.PULL


def _why_not_at_all(
    request: SchedulingRequest, candidates: Sequence[Candidate], computing: Candidate, policy: SourcePolicy
) -> SourceReason | None:
    if not policy.configured:
        return SourceReason.NOT_CONFIGURED
    if not policy.active and not any(terms.active for terms in policy.by_class.values()):
        return SourceReason.NO_THRESHOLD if policy.enabled else SourceReason.SWITCHED_OFF
    if request.token_ids is None:
        return SourceReason.NO_TOKENS
    if not any(c.match.state.has_claim for c in candidates):
        return SourceReason.NO_CLAIM
    if not computing.match.state.has_claim:
        return SourceReason.DESTINATION_UNKNOWN
    return None


def _sample(weights: Sequence[float], coordinate: float) -> int:
    """Index whose share of the total holds the coordinate. Subtracts, as the reference does, so that
    rounding falls on the same side."""
    left = coordinate * sum(weights)
    for i, weight in enumerate(weights):
        if left < weight:
            return i
        left -= weight
    return len(weights) - 1


def _deepest(candidates: Sequence[Candidate], depths: Sequence[int]) -> tuple[Candidate, ...]:
    """The `MAX_RECORDED` deepest holders, deepest first."""
    return tuple(candidates[i] for i in largest(depths, MAX_RECORDED) if depths[i])


def _window(sampled: int, size: int) -> range:
    """At most `MAX_RECORDED` positions of the band, the sampled one among them."""
    start = max(0, min(sampled - MAX_RECORDED + 1, size - MAX_RECORDED)) if sampled >= MAX_RECORDED else 0
    return range(start, min(size, start + MAX_RECORDED))
