"""Whether a request's routing headers, or its leg header, may be believed. Reads a clock, no I/O."""

from __future__ import annotations

import time

from sidecar import wire
from sidecar.allowlist import AllowList
from sidecar.endpoint import HostPort
from sidecar.headers import joined, values_of
from sidecar.http.service import Request
from sidecar.routing_auth import RoutingAuth, RoutingClaims, verify_routing


class Trust:
    """Of one listener, which headers name as `serving`. `key` None: nothing is signed."""

    def __init__(self, key: bytes | None, serving: HostPort, allow_list: AllowList) -> None:
        self._key = key
        self._serving = serving
        self._allow_list = allow_list

    def auth(self, request: Request) -> RoutingAuth:
        """Of the picker's headers."""
        if self._key is None:
            return RoutingAuth.OFF
        headers = request.headers
        claims = RoutingClaims(
            request_id=request_id(request),
            destination=self._signed_destination(request),
            prefiller=joined(headers, wire.PREFILLER_HOST_PORT),
            source=joined(headers, wire.KV_CACHE_SOURCE_HOST_PORT),
        )
        return verify_routing(self._key, headers.get(wire.ROUTING_AUTH), claims, now_s=time.time())

    def from_peer(self, request: Request) -> bool:
        """A leg is believed when it is signed or, without a key, comes from a pool member's address."""
        leg = request.headers.get(wire.LEG)
        if leg is None:
            return False
        if self._key is None:
            return not self._allow_list.enforced or self._allow_list.has_host(request.remote)
        claims = RoutingClaims.of_leg(request_id(request), str(self._serving), leg)
        auth = request.headers.get(wire.ROUTING_AUTH)
        return verify_routing(self._key, auth, claims, now_s=time.time()).trusted

    def _signed_destination(self, request: Request) -> str:
        """The destination the picker signed: a fallback list counts where it names this listener."""
        own = str(self._serving)
        listed = values_of(request.headers, wire.DESTINATION)
        return joined(request.headers, wire.DESTINATION) if own in listed else own


def request_id(request: Request) -> str:
    """As the header has it; absent is empty."""
    return request.headers.get(wire.REQUEST_ID, "")
