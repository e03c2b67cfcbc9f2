"""Which holders of a prefix may be sampled as the source of a pull, and with which weight.

The costly part of the source rule: it looks at every candidate, so it is written to do that once, without a
call in the ordinary case. Rules and reasons: `kv_source`. It does not learn, log or remember.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.columns import within_reach
from epp.core.thresholds import MODE_COST, SOURCE_CLASS_LABEL, SourcePolicy
from epp.core.types import MAX_RECORDED, Candidate, SourceReason


@dataclass(frozen=True, slots=True)
class Band:
    """Who may be sampled. Two lists, not a list of pairs: a thousand pairs cost half as much again."""

    rows: list[Candidate]
    weights: list[float]
    has_best: bool  # one of them is as deep as asked for


# what applies to holders of one class: least depth (tokens), most pulls at a time, whether those count as
# waiting (0 or 1), whether engines that report nothing will do, and the terms that this comes from
ClassRule = tuple[int, int, int, bool, SourcePolicy]


class Selection:
    """Which holders may be sampled, and with which weight."""

    __slots__ = ("_candidates", "_computing", "_depths", "_key", "_noted", "_peers", "_policy", "_rules")

    def __init__(
        self,
        candidates: Sequence[Candidate],
        depths: Sequence[int],
        computing: Candidate,
        policy: SourcePolicy,
        refused_peers: frozenset[str],
    ) -> None:
        """`depths`: servable tokens of each candidate, one of them at least above zero."""
        self._candidates, self._depths = candidates, depths
        self._computing = computing
        self._key = computing.metrics.info.pull_key if computing.metrics.info else None
        self._policy = policy
        self._peers = refused_peers - {""}
        self._rules: dict[str | None, ClassRule] = {}
        self._noted: list[tuple[int, int]] = []  # depth (negative) and place of holders passed over

    def band(self) -> Band:
        """Holders that may serve, within one block of the best of them, in the order given."""
        best = max(self._depths)
        band = self._within_reach(best)
        if not band.has_best:  # all of the deepest are refused, which is rare
            best = self._deepest_allowed()
            band = self._within_reach(best) if best else band
        return band

    @property
    def refused(self) -> tuple[tuple[EndpointId, SourceReason], ...]:
        """Of the holders at least as deep as the band the deepest that were passed over, and why."""
        noted = heapq.nsmallest(MAX_RECORDED, set(self._noted))
        return tuple((self._candidates[i].endpoint.id, self._reason(i)) for _, i in noted)

    def _within_reach(self, best: int) -> Band:
        """Allowed holders less than a block below `best`, and none deeper. One loop, without a call in the
        ordinary case: a thousand holders may tie."""
        classified, key, plain = bool(self._policy.by_class), self._key, not self._peers
        rules, refuses, candidates, depths = self._rules, self._refuses, self._candidates, self._depths
        least, most, counted, lax, _ = self._rule(None, self._policy)
        places = within_reach(candidates, depths, best)
        rows = [candidates[i] for i in places]
        weights = _weights(rows, key, most, counted, lax) if plain and not classified else []
        del rows[len(weights) :]
        for i in places[len(weights) :]:
            depth, candidate = depths[i], candidates[i]
            endpoint, metrics, load, _, _ = candidate
            if classified:
                name = endpoint.labels.get(SOURCE_CLASS_LABEL)
                rule = rules.get(name) or self._rule(name, self._policy.of_class(name))
                least, most, counted, lax, _ = rule
            info, served = metrics.info, load.pulls_served
            fits = lax if info is None or key is None else info.pull_key is key  # interned
            ordinary = fits and plain and least <= depth and served < most and not endpoint.draining
            if not ordinary and refuses(depth, candidate):
                self._noted.append((-depth, i))
                continue
            rows.append(candidate)
            weights.append(1.0 / (1.0 + (metrics.waiting_requests or 0.0) + served * counted))
        refused_best = sum(depth == -best for depth, _ in self._noted)
        return Band(rows, weights, self._depths.count(best) > refused_best)

    def _deepest_allowed(self) -> int:
        """Depth of the deepest holder that may serve; 0: none may."""
        depths, candidates, refuses = self._depths, self._candidates, self._refuses
        noted = 0
        for i in sorted(range(len(depths)), key=depths.__getitem__, reverse=True):
            depth, candidate = depths[i], candidates[i]
            if not depth or not refuses(depth, candidate):
                return depth
            if noted < MAX_RECORDED:
                self._noted.append((-depth, i))
                noted += 1
        return 0

    def terms(self, candidate: Candidate) -> SourcePolicy:
        """What applies to this holder as a source."""
        return self._rule_of(candidate)[-1]

    def _rule_of(self, candidate: Candidate) -> ClassRule:
        name = candidate.endpoint.labels.get(SOURCE_CLASS_LABEL) if self._policy.by_class else None
        return self._rules.get(name) or self._rule(name, self._policy.of_class(name))

    def _rule(self, name: str | None, terms: SourcePolicy) -> ClassRule:
        """A class with a delta of its own is held to it before the sampling, so that a far holder never
        takes the place of a near one that would do; where a price is asked for, that decides later."""
        general, least = self._policy, 0
        if general.by_class:
            delta = terms.min_cached_token_delta
            if not terms.enabled or delta is None:
                least = sys.maxsize
            elif delta != general.min_cached_token_delta and terms.mode != MODE_COST:
                least = delta + self._computing.match.expected_tokens
        limit = terms.max_inflight_pulls
        most = sys.maxsize if limit is None else limit
        counted, lax = (1 if terms.inflight_awareness else 0), not terms.require_verified
        rule = self._rules[name] = (least, most, counted, lax, terms)
        return rule

    def _refuses(self, depth: int, candidate: Candidate) -> bool:
        info, key = candidate.metrics.info, self._key
        if info is not None and key is not None and info.pull_key is not key:  # by far the most usual one
            return candidate.endpoint.id != self._computing.endpoint.id
        return self._refusal(depth, candidate, self._rule_of(candidate)) is not None

    def _reason(self, i: int) -> SourceReason:
        candidate = self._candidates[i]
        reason = self._refusal(self._depths[i], candidate, self._rule_of(candidate))
        assert reason is not None
        return reason

    def _refusal(self, depth: int, candidate: Candidate, rule: ClassRule) -> SourceReason | None:
        """Why this holder may not serve the computing endpoint; never asked of that one itself."""
        endpoint, info = candidate.endpoint, candidate.metrics.info
        least, most, _, lax, terms = rule
        if endpoint.id == self._computing.endpoint.id:
            return None
        if endpoint.draining:
            return SourceReason.DRAINING
        if depth < least:
            return _class_reason(terms)
        if info is None or self._key is None:  # unverified: named as the reference would, unless refused
            if not lax:
                return SourceReason.UNVERIFIED
        elif info.pull_key != self._key:
            return SourceReason.INCOMPATIBLE
        if self._peers and not self._peers.isdisjoint(_peer_names(candidate)):
            return SourceReason.PEER_REFUSED
        return SourceReason.OVER_LIMIT if candidate.load.pulls_served >= most else None


def _weights(rows: Sequence[Candidate], key: str | None, most: int, counted: int, lax: bool) -> list[float]:
    """Weights of the first rows, up to one that has to be looked at closely. Without classes and refusals:
    that is, nearly always, of all.

    Unknown counts as 0 waiting, as in the reference: refusing a holder because its scrape is late would
    recompute seconds of prefill to save one bad guess."""
    weights: list[float] = []
    for endpoint, metrics, load, _, _ in rows:
        info, served = metrics.info, load.pulls_served
        fits = lax if info is None or key is None else info.pull_key is key  # interned
        if not fits or served >= most or endpoint.draining:
            break
        weights.append(1.0 / (1.0 + (metrics.waiting_requests or 0.0) + served * counted))
    return weights


def _peer_names(candidate: Candidate) -> tuple[str, ...]:
    """What an engine may call this one in its refusal counter: its instance once known, its address
    before."""
    info, address = candidate.metrics.info, candidate.endpoint.p2p_address
    return (address, info.instance, info.p2p_addr) if info else (address,)


def _class_reason(terms: SourcePolicy) -> SourceReason:
    if not terms.enabled:
        return SourceReason.SWITCHED_OFF
    return SourceReason.NO_THRESHOLD if terms.min_cached_token_delta is None else SourceReason.BELOW_DELTA
