"""The placement tree against a naive model: a dictionary of (endpoint, prompt) -> expiry."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from engine_plugin.identity import EndpointId
from epp.core.placement_nodes import Claim
from epp.core.placement_tree import PlacementTree
from tests.unit.index.test_placement_tree import chain

ENDPOINTS = [EndpointId("a"), EndpointId("a", 1), EndpointId("b")]
Prompt = tuple[int, ...]

endpoints = st.sampled_from(ENDPOINTS)
# few contents, so that prompts share beginnings of every length
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.lists(st.just(0), min_size=1, max_size=40),
    st.builds(lambda n, tail: [0] * n + tail, st.integers(0, 40), st.lists(st.integers(1, 2), max_size=3)),
).map(tuple)
lifetimes = st.sampled_from([0.5, 1.0, 2.0, float("inf")])


class Placed(NamedTuple):
    claim: Claim
    endpoint: EndpointId
    prompt: Prompt
    placements: int


class PlacementMachine(RuleBasedStateMachine):
    placed = Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.tree = PlacementTree()
        self.model: dict[tuple[EndpointId, Prompt], float] = {}
        self.placements: dict[tuple[EndpointId, Prompt], int] = {}
        self.now_s = 0.0

    @rule(target=placed, prompt=prompts, endpoint=endpoints, lifetime_s=lifetimes)
    def insert(self, prompt: Prompt, endpoint: EndpointId, lifetime_s: float) -> Placed | None:
        expires_at_s = self.now_s + lifetime_s
        claim = self.tree.insert(chain(prompt), endpoint, expires_at_s)
        if claim is None:
            assert not prompt
            return None
        for length in range(1, len(prompt)):
            shorter = (endpoint, prompt[:length])
            if self.model.get(shorter, float("inf")) <= expires_at_s and shorter in self.model:
                del self.model[shorter]
        entry = (endpoint, prompt)
        self.model[entry] = max(expires_at_s, self.model.get(entry, expires_at_s))
        placements = self.placements[entry] = self.placements.get(entry, 0) + 1
        assert claim.placements == placements
        return Placed(claim, endpoint, prompt, placements)

    @rule(placed=placed)
    def withdraw(self, placed: Placed | None) -> None:
        if placed is None:
            return
        ended_before = placed.claim.node is None
        withdrawn = self.tree.withdraw(placed.claim, placed.placements)
        entry = (placed.endpoint, placed.prompt)
        assert withdrawn == (not ended_before and self.placements[entry] == placed.placements)
        if withdrawn:
            del self.model[entry]

    @rule(prompt=prompts, depth=st.integers(0, 45), endpoint=endpoints)
    def confirm(self, prompt: Prompt, depth: int, endpoint: EndpointId) -> None:
        self.tree.confirm(chain(prompt), {endpoint: depth})
        for length in range(1, min(depth, len(prompt)) + 1):
            self.model.pop((endpoint, prompt[:length]), None)

    @rule(endpoint=endpoints)
    def remove_endpoint(self, endpoint: EndpointId) -> None:
        mine = [entry for entry in self.model if entry[0] == endpoint]
        assert self.tree.remove_endpoint(endpoint) == len(mine)
        for entry in mine:
            del self.model[entry]

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(budget=st.integers(1, 3))
    def expire(self, budget: int) -> None:
        over = [entry for entry, expires_at_s in self.model.items() if expires_at_s <= self.now_s]
        assert self.tree.expire(self.now_s, budget) == min(budget, len(over))
        if len(over) <= budget:
            for entry in over:
                del self.model[entry]
        else:  # which ones is the tree's choice: the ones that were over first
            over.sort(key=lambda entry: self.model[entry])
            self.tree.expire(self.now_s, len(over))
            for entry in over:
                del self.model[entry]

    @rule(prompt=prompts)
    def match(self, prompt: Prompt) -> None:
        expected: dict[EndpointId, int] = {}
        for (endpoint, held), expires_at_s in self.model.items():
            shared = next((i for i, (x, y) in enumerate(zip(prompt, held, strict=False)) if x != y), None)
            depth = min(len(prompt), len(held)) if shared is None else shared
            if depth and self.now_s < expires_at_s:
                expected[endpoint] = max(depth, expected.get(endpoint, 0))
        assert self.tree.match(chain(prompt), self.now_s) == expected

    @invariant()
    def sound(self) -> None:
        self.placements = {e: n for e, n in self.placements.items() if e in self.model}
        self.tree.check_integrity()
        assert self.tree.claims == len(self.model)
        blocks = {held[: i + 1] for _, held in self.model for i in range(len(held))}
        assert len(self.tree) == len(blocks)

    def teardown(self) -> None:
        """Full drain leaves nothing."""
        for endpoint in ENDPOINTS:
            self.tree.remove_endpoint(endpoint)
        assert (len(self.tree), self.tree.claims, self.tree.bytes) == (0, 0, 0)
        self.tree.check_integrity()


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
