"""Where prompts were placed: what a picker knows of caches without any event.

A *claim* says: this endpoint was given this prompt, and that is believed until `expires_at_s`. It
covers every prefix of the prompt. A longer prompt on the same endpoint takes the place of a shorter
one that would not outlive it. The index has to walk its blocks, because its sets have holes; claims
are whole prefixes, so here a prompt costs as much as its path has branch points (`placement_nodes`).

Bounded by bytes and, if wanted, by blocks of one endpoint (the capacity of its cache, where placements
stand for its content). When full, the least recently placed prompt (of that endpoint) loses its tail
first: as many blocks off its end as are too many, then all back to the branch point before, and so on
towards the root. So the head of a prompt, which others share, goes last.

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
    max_blocks_per_endpoint: int | None = None


class PlacementTree:
    """The tree. `len` is the number of distinct blocks. Methods say whether they mutate."""

    def __init__(self, limits: PlacementLimits | None = None) -> None:
        self._limits = limits or PlacementLimits()
        self._nodes = PlacementNodes()
        self._recency: OrderedDict[Claim, None] = OrderedDict()  # least recently placed first
        self._by_endpoint: dict[EndpointId, OrderedDict[Claim, None]] = {}  # in the same order
        self._timers: list[tuple[float, int, Claim]] = []  # one a claim that time can end, and stale ones
        self._numbers = itertools.count()
        self._capacities: dict[EndpointId, int] = {}  # blocks, where an endpoint's own are known

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

    def held_blocks(self, endpoint: EndpointId) -> int:
        """Distinct blocks claimed of one endpoint."""
        return self._nodes.held[endpoint]

    def match(self, keys: PromptKeys, now_s: float) -> dict[EndpointId, int]:
        """Blocks of the prompt, from block 0 on, that each endpoint was given; endpoints with none are
        absent. Mutates nothing."""
        found: dict[EndpointId, int] = {}
        for node, depth in self._nodes.path(keys):
            for endpoint, expires_at_s in node.holders.items():
                if now_s < expires_at_s:
                    found[endpoint] = depth  # deeper nodes come later, and never outlive their parents
        return found

    def capacity(self, endpoint: EndpointId) -> int | None:
        """Blocks that are believed of one endpoint at most; None: as many as `max_bytes` allows."""
        return self._capacities.get(endpoint, self._limits.max_blocks_per_endpoint)

    def set_capacity(self, endpoint: EndpointId, blocks: int) -> None:
        """Mutates: `endpoint` holds so many blocks, whatever the limit for all says; until it is removed."""
        if blocks != self._capacities.get(endpoint):
            self._capacities[endpoint] = blocks
            self._evict(endpoint)

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
        self._evict(endpoint)
        return claim

    def _claim(self, node: Node, endpoint: EndpointId, expires_at_s: float) -> Claim:
        claim = node.ends.get(endpoint)
        if claim is None:
            claim = node.ends[endpoint] = Claim(endpoint, expires_at_s, node)
            self._recency[claim] = None
            self._by_endpoint.setdefault(endpoint, OrderedDict())[claim] = None
            self._set_timer(claim)
        else:
            claim.placements += 1
            claim.expires_at_s = max(claim.expires_at_s, expires_at_s)
            self._recency.move_to_end(claim)
            self._by_endpoint[endpoint].move_to_end(claim)
        return claim

    # --- ends of claims ---------------------------------------------------------------------------

    def withdraw(self, claim: Claim, placements: int) -> bool:
        """Mutates: a placement came to nothing; `placements` is what the claim counted with it. False:
        the claim has ended already, or the prompt was placed there again since, and that still stands."""
        if claim.node is None or claim.placements > placements:
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
        self._capacities.pop(endpoint, None)
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
        del mine[claim]
        if not mine:
            del self._by_endpoint[claim.endpoint]
        self._nodes.release(node, claim)
        if not self._recency:
            self._timers.clear()

    # --- the bound --------------------------------------------------------------------------------

    def _evict(self, endpoint: EndpointId) -> None:
        """Every step frees blocks, ends a claim or moves one towards the root."""
        limits = self._limits
        most = self.capacity(endpoint)
        while most is not None and self.held_blocks(endpoint) > most:
            self._shorten(next(iter(self._by_endpoint[endpoint])), self.held_blocks(endpoint) - most)
        while self.bytes > limits.max_bytes and self._recency:
            claim = next(iter(self._recency))
            assert claim.node is not None
            excess = -(-(self.bytes - limits.max_bytes) // KEY_BYTES)
            # to part what is shared would take a node more and free no key
            self._shorten(claim, excess if _is_alone(claim.node) else len(claim.node.keys))

    def _shorten(self, claim: Claim, blocks: int) -> None:
        """Take `blocks` off the end of a claim, or as many as there are up to the last branch point."""
        node, endpoint = claim.node, claim.endpoint
        assert node is not None
        parent = node.parent
        assert parent is not None
        if any(endpoint in child.holders for child in node.children.values()):
            self._end(claim)  # a prompt that was placed later goes on from here
        elif blocks < len(node.keys):
            if _is_alone(node):
                self._nodes.cut(node, blocks)
            else:
                self._move(claim, node, self._nodes.split(node, len(node.keys) - blocks))
        elif parent.parent is None or endpoint in parent.ends:
            self._end(claim)
        else:
            self._move(claim, node, parent)

    def _move(self, claim: Claim, node: Node, up: Node) -> None:
        up.ends[claim.endpoint] = claim
        claim.node = up
        self._nodes.release(node, claim)

    def check_integrity(self) -> None:
        """Recount everything. Raises IndexCorrupt on a difference. Slow: for tests."""
        claims = self._nodes.check_integrity()
        require(claims == set(self._recency), "the order of use is off")
        by_endpoint: dict[EndpointId, list[Claim]] = {}
        for claim in self._recency:
            by_endpoint.setdefault(claim.endpoint, []).append(claim)
        told = {endpoint: list(mine) for endpoint, mine in self._by_endpoint.items()}
        require(by_endpoint == told, "the claims of endpoints are off")
        timed = [claim for _, _, claim in self._timers if claim.node is not None]
        require(len(timed) == len(set(timed)), "a claim has two timers")
        require({c for c in claims if isfinite(c.expires_at_s)} <= set(timed), "a claim has no timer")
        require(self.bytes <= self._limits.max_bytes, "the bound is exceeded")
        for endpoint, blocks in self._nodes.held.items():
            most = self.capacity(endpoint)
            require(most is None or blocks <= most, "an endpoint has too much")


def _is_alone(node: Node) -> bool:
    """Only one claim keeps its blocks."""
    return not node.children and len(node.ends) == 1
