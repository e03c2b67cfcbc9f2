"""The source rule: may the computing endpoint pull this prompt's prefix, and from whom?

One pure function. Semantics: llm-d-router `p2p-source-producer` at ebab687 (CPU prefix, band, weights,
sampling coordinate, delta, never itself); with `inflight_awareness` off and no holder refused it names
exactly what the reference names for the same list of endpoints (here always in the order of their
ids). Ours on top: a holder must have a claim, must not drain, must not be known incompatible or to
have been refused, and must have room for one more pull. It does not learn, log or remember.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.thresholds import SOURCE_CLASS_LABEL, SourcePolicy
from epp.core.types import (
    MAX_RECORDED,
    Candidate,
    ClaimState,
    KvSource,
    SchedulingRequest,
    SourceChoice,
    SourceReason,
)

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193
# decided without a look at the holders; where pulls are off, a replay still wants to know them
_UNSEEN = (SourceReason.NOT_CONFIGURED, SourceReason.NO_TOKENS, SourceReason.NO_CLAIM)
_LIVE, _PARTIAL = ClaimState.LIVE, ClaimState.PARTIAL


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
    8 it gains less than the delta                 -> BELOW_DELTA
    9                                              -> PULL
    """
    delta, generation = policy.min_cached_token_delta, policy.generation
    reason = _why_not_at_all(request, candidates, computing, policy)
    if reason in _UNSEEN:
        return SourceChoice(None, reason, (), delta, generation)
    depths = _servable_tokens(candidates)
    holders_total = len(depths) - depths.count(0)
    if reason is not None or not holders_total:
        reason = reason or SourceReason.NO_HOLDER
        holders = _deepest(candidates, depths) if holders_total else ()
        return SourceChoice(None, reason, (), delta, generation, 0, (), holders, holders_total)
    holders = _deepest(candidates, depths)
    selection = _Selection(computing, policy, refused_peers)
    band = selection.plain_band(candidates, depths) or selection.judged_band(candidates, depths)
    refused = tuple(selection.refused[:MAX_RECORDED])
    if not band.rows:
        return SourceChoice(None, refused[0][1], (), delta, generation, 0, refused, holders, holders_total)
    sampled = _sample(band.weights, sampling_coordinate(request.request_id))
    chosen = band.rows[sampled]
    servable_tokens = chosen.match.servable_tokens
    delta = selection.terms(chosen).min_cached_token_delta or 0
    gain_tokens = servable_tokens - computing.match.cached_tokens
    source, reason = None, SourceReason.PULL
    if chosen.endpoint.id == computing.endpoint.id:
        reason = SourceReason.LOCAL_BEST
    elif gain_tokens < delta:
        reason = SourceReason.BELOW_DELTA
    else:
        verified = chosen.metrics.info is not None and computing.metrics.info is not None
        source = KvSource(chosen.endpoint, servable_tokens, gain_tokens, verified)
    considered = tuple(
        (band.rows[i].endpoint.id, band.rows[i].match.servable_tokens, band.weights[i])
        for i in _window(sampled, len(band.rows))
    )
    return SourceChoice(
        source, reason, considered, delta, generation, len(band.rows), refused, holders, holders_total
    )


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


def _servable_tokens(candidates: Sequence[Candidate]) -> list[int]:
    """`PrefixMatch.servable_tokens` of each, without a call for each of a thousand."""
    return [
        m.cpu_blocks * m.block_size_tokens if m.state is _LIVE or m.state is _PARTIAL else 0
        for m in [c.match for c in candidates]
    ]


@dataclass(frozen=True, slots=True)
class _Band:
    """Who may be sampled. Two lists, not a list of pairs: a thousand pairs cost half as much again."""

    rows: list[Candidate]
    weights: list[float]


class _Selection:
    """Which holders may be sampled, and with which weight."""

    __slots__ = ("_computing", "_key", "_policy", "_refused_peers", "refused")

    def __init__(self, computing: Candidate, policy: SourcePolicy, refused_peers: frozenset[str]) -> None:
        self._computing = computing
        self._key = computing.metrics.info.pull_key if computing.metrics.info else None
        self._policy = policy
        self._refused_peers = refused_peers
        self.refused: list[tuple[EndpointId, SourceReason]] = []  # by `judged_band`, deepest first

    def plain_band(self, candidates: Sequence[Candidate], depths: Sequence[int]) -> _Band | None:
        """`judged_band` where nothing special is known of any holder within a block of the best; None:
        something is. One pass, without a call in the ordinary case: a thousand holders may tie."""
        policy, key, refused_peers = self._policy, self._key, self._refused_peers
        if policy.by_class:
            return None
        limit = policy.max_inflight_pulls
        most = sys.maxsize if limit is None else limit
        counted = 1 if policy.inflight_awareness else 0
        strict = policy.require_verified
        best = max(depths)
        rows: list[Candidate] = []
        weights: list[float] = []
        for depth, candidate in zip(depths, candidates, strict=True):
            if depth != best and (not depth or depth + candidate.match.block_size_tokens < best):
                continue
            metrics, served = candidate.metrics, candidate.load.pulls_served
            info = metrics.info
            if (info is None or info.pull_key is not key) and (  # interned
                strict or (info is not None and key is not None)
            ):
                return None
            if served >= most or candidate.endpoint.draining:
                return None
            if refused_peers and not refused_peers.isdisjoint(peer_names(candidate)):
                return None
            waiting = metrics.waiting_requests or 0.0
            rows.append(candidate)
            weights.append(1.0 / (1.0 + waiting + served * counted))
        return _Band(rows, weights)

    def judged_band(self, candidates: Sequence[Candidate], depths: Sequence[int]) -> _Band:
        """Holders that may serve, within one block of the best of them, in the order given."""
        kept: list[tuple[int, Candidate, SourcePolicy]] = []
        refused: list[tuple[int, EndpointId, SourceReason]] = []
        for depth, candidate in zip(depths, candidates, strict=True):
            if not depth:
                continue
            terms = self.terms(candidate)
            reason = self._refusal(candidate, depth, terms)
            if reason is None:
                kept.append((depth, candidate, terms))
            else:
                refused.append((-depth, candidate.endpoint.id, reason))
        refused.sort(key=lambda row: row[:2])
        self.refused = [(endpoint, reason) for _, endpoint, reason in refused]
        best = max((depth for depth, _, _ in kept), default=0)
        band = [(c, terms) for depth, c, terms in kept if depth + c.match.block_size_tokens >= best]
        return _Band([c for c, _ in band], [_weight(c, terms) for c, terms in band])

    def terms(self, candidate: Candidate) -> SourcePolicy:
        """What applies to this holder as a source."""
        by_class = self._policy.by_class
        if not by_class:
            return self._policy
        return self._policy.of_class(candidate.endpoint.labels.get(SOURCE_CLASS_LABEL))

    def _refusal(self, candidate: Candidate, depth: int, terms: SourcePolicy) -> SourceReason | None:
        """Why this holder may not serve the computing endpoint; never asked of that one itself."""
        if candidate.endpoint.id == self._computing.endpoint.id:
            return None
        if candidate.endpoint.draining:
            return SourceReason.DRAINING
        if self._policy.by_class and (reason := self._class_refusal(terms, depth)):
            return reason
        info = candidate.metrics.info
        if info is None or self._key is None:  # unverified: named as the reference would, unless refused
            if terms.require_verified:
                return SourceReason.UNVERIFIED
        elif info.pull_key != self._key:
            return SourceReason.INCOMPATIBLE
        if self._refused_peers and not self._refused_peers.isdisjoint(peer_names(candidate)):
            return SourceReason.PEER_REFUSED
        limit = terms.max_inflight_pulls
        if limit is not None and candidate.load.pulls_served >= limit:
            return SourceReason.OVER_LIMIT
        return None

    def _class_refusal(self, terms: SourcePolicy, depth: int) -> SourceReason | None:
        """A class with a delta of its own is held to it before the sampling, so that a far holder
        never takes the place of a near one that would do."""
        if not terms.enabled:
            return SourceReason.SWITCHED_OFF
        if terms.min_cached_token_delta is None:
            return SourceReason.NO_THRESHOLD
        if terms.min_cached_token_delta == self._policy.min_cached_token_delta:
            return None
        gain_tokens = depth - self._computing.match.cached_tokens
        return SourceReason.BELOW_DELTA if gain_tokens < terms.min_cached_token_delta else None


def _weight(candidate: Candidate, terms: SourcePolicy) -> float:
    """1/(1+waiting), with the pulls that the holder already serves for us counted as waiting where
    `inflight_awareness` says so. Unknown counts as 0 waiting, as in the reference: refusing a holder
    because its scrape is late would recompute seconds of prefill to save one bad guess."""
    waiting = candidate.metrics.waiting_requests or 0.0
    return 1.0 / (1.0 + waiting + (candidate.load.pulls_served if terms.inflight_awareness else 0))


def peer_names(candidate: Candidate) -> tuple[str, ...]:
    """What an engine may call this one in its refusal counter: its instance once known, its address
    before."""
    info, address = candidate.metrics.info, candidate.endpoint.p2p_address
    names = (address, info.instance, info.p2p_addr) if info else (address,)
    return tuple(name for name in names if name)


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
    best = max(depths)
    if depths.count(best) >= MAX_RECORDED:  # they tie: no need to rank the rest
        found = [depths.index(best)]
        while len(found) < MAX_RECORDED:
            found.append(depths.index(best, found[-1] + 1))
        return tuple(candidates[i] for i in found)
    least = max(1, sorted(depths)[-MAX_RECORDED:][0])
    deeper = [i for i, depth in enumerate(depths) if depth > least]
    equal = itertools.islice((i for i, depth in enumerate(depths) if depth == least), MAX_RECORDED)
    deep = sorted([*deeper, *equal], key=depths.__getitem__, reverse=True)
    return tuple(candidates[i] for i in deep[:MAX_RECORDED])


def _window(sampled: int, size: int) -> range:
    """At most `MAX_RECORDED` positions of the band, the sampled one among them."""
    start = max(0, min(sampled - MAX_RECORDED + 1, size - MAX_RECORDED)) if sampled >= MAX_RECORDED else 0
    return range(start, min(size, start + MAX_RECORDED))
