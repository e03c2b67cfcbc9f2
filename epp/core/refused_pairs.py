"""Which peers an engine has just refused, or was refused by: pairs that a pull would fail between.

Fed with `kvpull_peer_refused_total` of the computing engine's page. A counter that rises holds the pair
back for a while, then it is tried again: the peer may have been mended at the same address, and if it
was not, the next attempt costs one handshake and raises the counter again. Engines name a peer by its
instance once they know it, so a restarted peer is free at once. Pure; bounded by `MAX_PEERS` an engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_plugin.identity import EndpointId

MAX_PEERS = 256
HOLD_S = 60.0  # identity, key or protocol differ: only a restart mends that
BUSY_HOLD_S = 2.0  # `limit`: the peer serves as much as it can
_BUSY = "limit"


class RefusedPairs:
    """Refused peers an engine, by the names that the engine gives them."""

    def __init__(self) -> None:
        self._counts: dict[EndpointId, dict[tuple[str, str], float]] = {}
        self._held_until_s: dict[EndpointId, dict[str, float]] = {}

    def observe(self, engine: EndpointId, counts: Mapping[tuple[str, str], float], now_s: float) -> None:
        """The counters of one page by (peer, reason). What an engine counted before it was first seen
        counts as just now; a counter that fell belongs to a restarted engine and starts afresh."""
        if not counts:
            self.forget(engine)
            return
        before = self._counts.get(engine, {})
        if any(counts.get(key, 0.0) < count for key, count in before.items()):
            self.forget(engine)
            before = {}
        held = {p: s for p, s in self._held_until_s.get(engine, {}).items() if s > now_s}
        kept = dict(list(counts.items())[:MAX_PEERS])
        for (peer, reason), count in kept.items():
            if count > before.get((peer, reason), 0.0):
                until_s = now_s + (BUSY_HOLD_S if reason == _BUSY else HOLD_S)
                held[peer] = max(held.get(peer, until_s), until_s)
        self._counts[engine] = kept
        self._held_until_s[engine] = held

    def forget(self, engine: EndpointId) -> None:
        self._counts.pop(engine, None)
        self._held_until_s.pop(engine, None)

    def refused_by(self, engine: EndpointId, now_s: float) -> frozenset[str]:
        """Names of the peers that `engine` should not pull from now."""
        held = self._held_until_s.get(engine)
        return frozenset(peer for peer, until_s in held.items() if until_s > now_s) if held else frozenset()
