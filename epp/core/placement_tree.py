"""Where prompts were placed: what a picker knows of caches without any event.

A *claim* says: this endpoint was given this prompt, and that is believed until `expires_at_s`. It
covers every prefix of the prompt. A longer prompt on the same endpoint takes the place of a shorter
one that would not outlive it. The index has to walk its blocks, because its sets have holes; claims
are whole prefixes, so here a prompt costs as much as its path has branch points (`placement_nodes`).

Bounded by bytes. When full, the least recently placed prompt loses its tail first: blocks that nobody
else claims are cut off its end until the tree fits, then its endpoint forgets it back to the branch
point before, and so on towards the root. So the head of a prompt, which others share, goes last.

What it says is never a residency: nobody can be asked to serve these blocks. It must not know engines,
events, tokens or the clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from engine_plugin.identity import EndpointId
from epp.core.block_table import require
from epp.core.hashing import PromptKeys
from epp.core.placement_nodes import Claim, Node, PlacementNodes

KEY_BYTES = 8
# what CPython 3.11 takes, tables included; `benchmarks/placement.py` compares with the real thing
NODE_BYTES = 640
CLAIM_BYTES = 420
HOLDER_BYTES = 100
_STALE_TIMERS = 64


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """`max_bytes` counts keys exactly and objects by the estimates above."""

    max_bytes: int = 64 << 20


class PlacementTree:
    """The tree. `len` is the number of distinct blocks. Methods say whether they mutate."""

    def __init__(self, limits: PlacementLimits | None = None) -> None:
        self._limits = limits or PlacementLimits()
        self._nodes = PlacementNodes()
        self._recency: OrderedDict[Claim, None] = OrderedDict()  # least recently placed first
        self._by_endpoint: dict[EndpointId, set[Claim]] = {}
        self._timers: list[tuple[float, int, Claim]] = []  # one a claim that time can end, and stale ones
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._nodes.blocks

    @property
    def claims(self) -> int:
        return len(self._recency)

    @property
    def bytes(self) -> int:
        """What the bound counts."""
        nodes = self._nodes
        objects = NODE_BYTES * nodes.count + CLAIM_BYTES * self.claims + HOLDER_BYTES * nodes.holders
        return KEY_BYTES * nodes.blocks + objects

    def claims_of(self, endpoint: EndpointId) -> int:
        return len(self._by_endpoint.get(endpoint, ()))

    def match(self, keys: PromptKeys, now_s: float) -> dict[EndpointId, int]:
        """Blocks of the prompt, from block 0 on, that each endpoint was given; endpoints with none are
        absent. Mutates nothing."""
        found: dict[EndpointId, int] = {}
        for node, depth in self._nodes.path(keys):
            for endpoint, expires_at_s in node.holders.items():
                if now_s < expires_at_s:
                    found[endpoint] = depth  # deeper nodes come later, and never outlive their parents
        return found

    def insert(self, keys: PromptKeys, endpoint: EndpointId, expires_at_s: float) -> Claim | None:
        """Mutates: the prompt was placed on `endpoint`. Placed there before: the later expiry counts.
        None: the prompt has not one whole block."""
        if not keys:
            return None
        *passed, last = self._nodes.reach(keys, endpoint, expires_at_s)
        claim = self._claim(last, endpoint, expires_at_s)
        for node in passed:
            shorter = node.ends.get(endpoint)
            if shorter is not None and shorter.expires_at_s <= expires_at_s:
                self._end(shorter)
        self._evict()
        return claim

    def _claim(self, node: Node, endpoint: EndpointId, expires_at_s: float) -> Claim:
        claim = node.ends.get(endpoint)
        if claim is None:
            claim = node.ends[endpoint] = Claim(endpoint, expires_at_s, node)
            self._recency[claim] = None
            self._by_endpoint.setdefault(endpoint, set()).add(claim)
            self._set_timer(claim)
        else:
            claim.expires_at_s = max(claim.expires_at_s, expires_at_s)
            self._recency.move_to_end(claim)
        return claim

    # --- ends of claims ---------------------------------------------------------------------------

    def withdraw(self, claim: Claim, expires_at_s: float) -> bool:
        """Mutates: the placement that was made with this expiry came to nothing. False: the claim has
        ended already, or the prompt was placed there again since, and that still stands."""
        if claim.node is None or claim.expires_at_s > expires_at_s:
            return False
        self._end(claim)
        return True

    def confirm(self, keys: PromptKeys, depths: Mapping[EndpointId, int]) -> None:
        """Mutates: end the claims on this prompt, or on a prefix of it, whose blocks the endpoint is
        known to hold (`depths`, in blocks): from now on the confirmed entry speaks for them."""
        done = [
            claim
            for node, shared in self._nodes.path(keys)
            for claim in node.ends.values()
            if node.depth == shared <= depths.get(claim.endpoint, 0)
        ]
        for claim in done:
            self._end(claim)

    def remove_endpoint(self, endpoint: EndpointId) -> int:
        """Mutates: forget every placement on `endpoint`; how many there were."""
        claims = list(self._by_endpoint.get(endpoint, ()))
        for claim in claims:
            self._end(claim)
        return len(claims)

    def expire(self, now_s: float, budget: int) -> int:
        """Mutates: end up to `budget` claims whose time is over; how many. This only frees memory:
        `match` is right without it."""
        ended = 0
        while self._timers and self._timers[0][0] <= now_s and ended < budget:
            _, _, claim = heapq.heappop(self._timers)
            if claim.node is None:
                continue
            if claim.expires_at_s <= now_s:
                self._end(claim)
                ended += 1
            else:
                self._set_timer(claim)
        return ended

    def _set_timer(self, claim: Claim) -> None:
        if len(self._timers) > 2 * self.claims + _STALE_TIMERS:  # most claims ended before their time
            self._timers = [timer for timer in self._timers if timer[2].node is not None]
            heapq.heapify(self._timers)
        if isfinite(claim.expires_at_s):
            heapq.heappush(self._timers, (claim.expires_at_s, next(self._numbers), claim))

    def _end(self, claim: Claim) -> None:
        node, claim.node = claim.node, None
        assert node is not None
        del self._recency[claim]
        mine = self._by_endpoint[claim.endpoint]
        mine.remove(claim)
        if not mine:
            del self._by_endpoint[claim.endpoint]
        self._nodes.release(node, claim)
        if not self._recency:
            self._timers.clear()

    # --- the bound --------------------------------------------------------------------------------

    def _evict(self) -> None:
        """Every step frees blocks, ends a claim or moves one towards the root."""
        while self.bytes > self._limits.max_bytes and self._recency:
            self._shorten(next(iter(self._recency)), self.bytes - self._limits.max_bytes)

    def _shorten(self, claim: Claim, excess_bytes: int) -> None:
        node = claim.node
        assert node is not None
        parent = node.parent
        assert parent is not None
        blocks = -(-excess_bytes // KEY_BYTES)
        if not node.children and len(node.ends) == 1 and blocks < len(node.keys):
            self._nodes.cut(node, blocks)
        elif parent.parent is None or claim.endpoint in parent.ends:
            self._end(claim)
        else:
            parent.ends[claim.endpoint] = claim
            claim.node = parent
            self._nodes.release(node, claim)

    def check_integrity(self) -> None:
        """Recount everything. Raises IndexCorrupt on a difference. Slow: for tests."""
        claims = self._nodes.check_integrity()
        require(claims == set(self._recency), "the order of use is off")
        by_endpoint: dict[EndpointId, set[Claim]] = {}
        for claim in claims:
            by_endpoint.setdefault(claim.endpoint, set()).add(claim)
        require(by_endpoint == self._by_endpoint, "the claims of endpoints are off")
        timed = [claim for _, _, claim in self._timers if claim.node is not None]
        require(len(timed) == len(set(timed)), "a claim has two timers")
        require({c for c in claims if isfinite(c.expires_at_s)} <= set(timed), "a claim has no timer")
        require(self.bytes <= self._limits.max_bytes, "the bound is exceeded")
