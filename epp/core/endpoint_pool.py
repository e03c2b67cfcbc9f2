"""Who is in the pool, in the order of ids: the order in which candidates stand and sources are sampled."""

from __future__ import annotations

from engine_plugin.identity import EndpointId
from epp.core.types import Endpoint


class EndpointPool:
    """Endpoints by identity. What is derived from them is made once a change, not once a request."""

    def __init__(self) -> None:
        self._by_id: dict[EndpointId, Endpoint] = {}
        self._has_replay: dict[EndpointId, bool] = {}
        self._in_order: tuple[Endpoint, ...] | None = None  # None: the pool has changed
        self._serving: tuple[list[Endpoint], list[EndpointId]] | None = None  # likewise

    def __contains__(self, endpoint_id: EndpointId) -> bool:
        return endpoint_id in self._by_id

    @property
    def in_order(self) -> tuple[Endpoint, ...]:
        """All of them."""
        if self._in_order is None:
            self._in_order = tuple(sorted(self._by_id.values(), key=lambda e: e.id))
        return self._in_order

    @property
    def serving(self) -> tuple[list[Endpoint], list[EndpointId]]:
        """Those that take requests, and their ids. Not to be changed by who reads them."""
        if self._serving is None:
            rows = [e for e in self.in_order if not e.draining]
            self._serving = rows, [e.id for e in rows]
        return self._serving

    def is_another(self, endpoint: Endpoint, has_replay: bool) -> bool:
        """Whether an engine of this identity is known and this is not it: another address, or a replay socket
        that came or went."""
        known = self._by_id.get(endpoint.id)
        if known is None:
            return False
        return known.address != endpoint.address or self._has_replay[endpoint.id] != has_replay

    def put(self, endpoint: Endpoint, has_replay: bool) -> None:
        """Add it, or change what is known of it."""
        self._by_id[endpoint.id] = endpoint
        self._has_replay[endpoint.id] = has_replay
        self._in_order = self._serving = None

    def remove(self, endpoint_id: EndpointId) -> bool:
        """False: it was not there."""
        self._in_order = self._serving = None
        self._has_replay.pop(endpoint_id, None)
        return self._by_id.pop(endpoint_id, None) is not None
