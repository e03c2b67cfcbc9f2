"""What endpoints may hold, as placements suggest: `approx-prefix-cache-producer`.

No event is needed: a prompt that was sent to an endpoint counts as held there until its capacity is used up
by later ones; then prompts lose their tails first (`placement_tree`). It is a guess: it moves requests,
and nobody is ever asked to serve these blocks. Keys are made of exact tokens where they are known and of
4-byte pieces of the prompt where they are not; the two never meet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine_plugin.identity import EndpointId
from epp.core.hashing import INDEX_SEED_BYTES, BlockHasher, InvalidTokens, PromptKeys, pack_tokens
from epp.core.placement_tree import PlacementLimits, PlacementTree
from epp.core.types import ClaimState, PrefixMatch, SchedulingRequest

_FOR_EVER = float("inf")
_NO_KEYS: PromptKeys = array("Q")


@dataclass(frozen=True, slots=True)
class ApproxSettings:
    """`capacity_blocks` of one endpoint; `max_blocks` of one prompt are looked at."""

    block_size_tokens: int = 64
    max_blocks: int = 2_048
    capacity_blocks: int = 31_250
    max_bytes: int = 256 << 20
    auto_tune: bool = False  # capacities are those that the engines report, where they do
    seed: bytes = field(default=bytes(INDEX_SEED_BYTES), repr=False)


@dataclass(frozen=True, slots=True)
class ApproxLookUp:
    """Matches by endpoint, and what `place` needs."""

    matches: Mapping[EndpointId, PrefixMatch]
    keys: PromptKeys = field(default_factory=lambda: _NO_KEYS)


class ApproxPrefixes:
    """One tree for the whole pool. Belongs to the picker's thread."""

    def __init__(self, settings: ApproxSettings) -> None:
        self._settings = settings
        self._hasher = BlockHasher(settings.seed)
        self._tree = PlacementTree(PlacementLimits(settings.max_bytes, settings.capacity_blocks))

    def look_up(self, request: SchedulingRequest, endpoints: Iterable[EndpointId]) -> ApproxLookUp:
        """Mutates nothing. Endpoints that were given none of it hold nothing, as far as is known."""
        keys = self._keys(request)
        depths = self._tree.match(keys, 0.0) if keys else {}
        size = self._settings.block_size_tokens
        nothing = PrefixMatch(ClaimState.LIVE, block_size_tokens=size)
        by_depth = {
            depth: PrefixMatch(ClaimState.LIVE, depth, depth, 0, size) for depth in set(depths.values())
        }
        return ApproxLookUp({e: by_depth.get(depths.get(e, 0), nothing) for e in endpoints}, keys)

    def place(self, look_up: ApproxLookUp, endpoints: Iterable[EndpointId]) -> None:
        """Mutates: the looked-up prompt goes to `endpoints`. It stays believed even if the request is
        given up: what of it was there before still is."""
        for endpoint in dict.fromkeys(endpoints):
            self._tree.insert(look_up.keys, endpoint, _FOR_EVER)

    def note_cache(self, endpoint: EndpointId, cache_tokens: int | None) -> None:
        """Mutates: what the endpoint's cache can hold, as its engine reports it; None: it does not."""
        if self._settings.auto_tune and cache_tokens is not None:
            self._tree.set_capacity(endpoint, max(1, cache_tokens // self._settings.block_size_tokens))

    def forget(self, endpoint: EndpointId) -> None:
        """Mutates: its cache is gone."""
        self._tree.remove_endpoint(endpoint)

    @property
    def blocks(self) -> int:
        """Distinct blocks of all prompts."""
        return len(self._tree)

    @property
    def bytes(self) -> int:
        return self._tree.bytes

    def held_blocks(self, endpoint: EndpointId) -> int:
        return self._tree.held_blocks(endpoint)

    def check_integrity(self) -> None:
        """Raises IndexCorrupt. Slow: for tests."""
        self._tree.check_integrity()

    def _keys(self, request: SchedulingRequest) -> PromptKeys:
        exact = request.token_ids is not None
        tokens = request.token_ids if exact else request.pieces
        if not tokens:
            return _NO_KEYS
        most = self._settings.max_blocks * self._settings.block_size_tokens
        try:
            packed = pack_tokens(tokens[:most] if len(tokens) > most else tokens)
        except InvalidTokens:  # ids that no engine could have: no match
            return _NO_KEYS
        model = request.model if exact else f"{request.model}\0pieces"
        root = self._hasher.root(model, request.lora_name, request.cache_salt)
        return array("Q", self._hasher.chain(root, packed, self._settings.block_size_tokens))
