"""Speculative entries: blocks that are expected at an endpoint because a request was just sent there.

Between a decision and the engine's first events lie a queue and a prefill. Without these entries the
next request of the same session sees no trace of the one in front of it and is sent elsewhere. They
are a tier of their own: they move requests (scorers, deciders) and count at the endpoint that would
compute, but nobody can be asked to serve them, so they are never a source.

Life of an entry: `place` with the decision -> ends by whichever comes first: its time to live, confirmed
blocks (`expected` sees that the index holds all of it), the request's end without a first token
(`withdraw`), `forget` (the endpoint was cleared, has restarted or left). After the first token
(`settle`) only the end of the request means nothing any more.

Pure: no clock, no I/O. It must not know events or claim states: its owner asks only for endpoints
whose cache is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine_plugin.identity import EndpointId
from epp.core.hashing import PromptKeys
from epp.core.placement_nodes import Claim
from epp.core.placement_tree import PlacementLimits, PlacementTree
from epp.core.prefix_index import Depths

_EXPIRED_PER_CALL = 64  # a decision places two at most, so the overdue cannot pile up


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """`speculativeTTL` of the precise producer (reference default), and the bound on memory."""

    ttl_s: float = 2.0
    limits: PlacementLimits = field(default_factory=PlacementLimits)


class SpeculativeEntries:
    """One tree for the whole pool: keys of different models and block sizes never meet."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._ttl_s = settings.ttl_s
        self._tree = PlacementTree(settings.limits)
        self._pending: dict[str, list[tuple[Claim, int]]] = {}  # until first token or end

    def place(self, placement_id: str, placed: Iterable[tuple[EndpointId, PromptKeys]], now_s: float) -> None:
        """Mutates: a request with these keys goes to these endpoints."""
        expires_at_s = now_s + self._ttl_s
        claims = [self._tree.insert(keys, endpoint, expires_at_s) for endpoint, keys in placed]
        made = [(claim, claim.placements) for claim in claims if claim is not None]
        if made:
            self._pending[placement_id] = made

    def settle(self, placement_id: str) -> None:
        """Mutates: the prompt was computed; how the request ends says nothing about its blocks now."""
        self._pending.pop(placement_id, None)

    def withdraw(self, placement_id: str) -> None:
        """Mutates: the request has ended. Without a first token its blocks never came. Idempotent."""
        for claim, placements in self._pending.pop(placement_id, ()):
            self._tree.withdraw(claim, placements)

    def forget(self, endpoint: EndpointId) -> None:
        """Mutates: whatever was on its way to `endpoint`, its cache is empty, or gone."""
        self._tree.remove_endpoint(endpoint)

    def expected(
        self, keys: PromptKeys, depths: Mapping[EndpointId, Depths], now_s: float
    ) -> dict[EndpointId, int]:
        """Depth in blocks at endpoints where more of the prompt is expected than is confirmed.

        `depths`: what is confirmed, at the endpoints of interest. The answer counts unconfirmed blocks
        alone: behind a hole in the confirmed ones both together may reach deeper, so it is a lower
        bound. Mutates: ends what is confirmed, and some of what is overdue.
        """
        tree = self._tree
        tree.expire(now_s, _EXPIRED_PER_CALL)
        found = {e: depth for e, depth in tree.match(keys, now_s).items() if e in depths}
        if not found:
            return found
        confirmed = {endpoint: depths[endpoint].blocks for endpoint in found}
        tree.confirm(keys, confirmed)
        return {endpoint: depth for endpoint, depth in found.items() if depth > confirmed[endpoint]}

    def entries(self, endpoint: EndpointId) -> int:
        """Prompts expected at `endpoint`; overdue ones count until they are swept."""
        return self._tree.claims_of(endpoint)

    @property
    def pending(self) -> int:
        """Requests whose end would still withdraw their entries."""
        return len(self._pending)

    @property
    def bytes(self) -> int:
        return self._tree.bytes

    def check_integrity(self) -> None:
        """Raises IndexCorrupt. Slow: for tests."""
        self._tree.check_integrity()
