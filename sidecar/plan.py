"""What to do with one request: headers in, one `ForwardPlan` out. Pure, no I/O, no clock.

Order of decisions (llm-d-router at ebab687, sidecar): prefiller, allow-list, source, encoder, legacy
data-parallel header. Cases:

    not signed while a key is set        every routing header dropped -> Aggregated
    leg of a peer's sidecar              PeerLeg: the body's kv_transfer_params are kept
    not a generating route               headers dropped -> Aggregated without a pull
    prefillers named, none allowed       Refused (403)
    prefiller is this endpoint           Aggregated, the source applies to it
    prefillers named                     PrefillDecode, the source applies to the prefiller
    otherwise                            Aggregated, with a pull if a source is left

A source that is malformed, unknown, or the computing endpoint itself is dropped with its reason: a
pull never makes a request fail. Nothing here maps an unknown port to rank 0.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from multidict import MultiMapping

from engine_plugin.identity import IdentityError, rank_of
from sidecar import wire
from sidecar.endpoint import EndpointError, HostPort
from sidecar.endpoint_file import EndpointRow
from sidecar.headers import values_of
from sidecar.routing_auth import RoutingAuth

MAX_PREFILLERS: Final = 8
_ROLE_LABEL: Final = "llm-d.ai/role"
_PREFILL_ROLES: Final = frozenset(
    {"prefill", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both"}
)


class Connector(enum.StrEnum):
    """KV connectors of the engine that this sidecar can speak for."""

    OFFLOADING = "offloading"
    NIXLV2 = "nixlv2"
    SGLANG = "sglang"
    MOONCAKE = "mooncake"


class Members(Protocol):
    """The pool as the sidecar knows it."""

    @property
    def enforced(self) -> bool:
        """Whether an address that is not a member is refused."""

    def find(self, address: HostPort) -> EndpointRow | None:
        """The member that serves at exactly this address and port."""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """What of the configuration decides about a request."""

    connector: Connector
    pull_enabled: bool
    p2p_base_port: int  # rank r of an endpoint without a row: + r
    base_port: int  # serving port of rank 0
    ranks: int
    sample_prefiller: bool = False  # start anywhere in the prefiller list instead of at its head


@dataclass(frozen=True, slots=True)
class Self:
    """The rank this listener stands for; `host` None: own address unknown."""

    host: str | None
    rank: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A remote endpoint: where it serves, and where its engine hands out blocks."""

    serving: HostPort
    p2p_port: int
    rank: int = 0  # data-parallel, within its pod


@dataclass(frozen=True, slots=True)
class Dropped:
    """A routing header that was not followed. Both texts are from fixed sets (metric labels)."""

    header: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aggregated:
    """One leg to the own engine; `source` None: no pull."""

    rank: int
    source: Peer | None = None
    kv_request_id: str = ""
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerLeg:
    """A prefill leg from a peer's sidecar: forwarded as it is."""

    rank: int
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """A prefill leg to the first of `prefillers` that answers, a decode leg to the own engine."""

    rank: int
    prefillers: tuple[Peer, ...]
    source: Peer | None
    kv_request_id: str
    dropped: tuple[Dropped, ...] = ()

    def source_for(self, prefiller: Peer) -> Peer | None:
        """The pull of one prefill leg: never from the prefiller to itself."""
        return None if self.source is None or self.source.serving == prefiller.serving else self.source


@dataclass(frozen=True, slots=True)
class Refused:
    """No leg at all: 403."""

    message: str
    dropped: tuple[Dropped, ...]


ForwardPlan = Aggregated | PeerLeg | PrefillDecode | Refused


@dataclass(frozen=True, slots=True)
class Facts:
    """What the shell knows of a request beside its headers."""

    auth: RoutingAuth
    generates: bool  # a route whose body carries kv_transfer_params
    from_peer: bool  # a leg header that is signed, or comes from a pool member's address


def plan_request(
    headers: MultiMapping[str],
    facts: Facts,
    own: Self,
    rules: RoutingRules,
    members: Members,
    make_id: Callable[[str | None], str],
) -> ForwardPlan:
    """Decide. `make_id` turns the decision id header into `kv_request_id`."""
    if wire.LEG in headers and facts.from_peer:
        return PeerLeg(own.rank)
    return _Planner(headers, own, rules, members, make_id).plan(facts)


class _Planner:
    """One call of `plan_request`: the arguments and the list of dropped headers."""

    def __init__(
        self,
        headers: MultiMapping[str],
        own: Self,
        rules: RoutingRules,
        members: Members,
        make_id: Callable[[str | None], str],
    ) -> None:
        self._headers = headers
        self._own = own
        self._rules = rules
        self._members = members
        self._make_id = make_id
        self._dropped: list[Dropped] = []

    def plan(self, facts: Facts) -> ForwardPlan:
        self._drop_if_present(wire.LEG, "not_from_peer")
        if not facts.auth.trusted:
            return self._without_routing(str(facts.auth))
        if not facts.generates:
            return self._without_routing("not_generating")
        named = values_of(self._headers, wire.PREFILLER_HOST_PORT)
        prefillers = self._prefillers(named)
        if named and not prefillers:
            reasons = sorted(
                {drop.reason for drop in self._dropped if drop.header == wire.PREFILLER_HOST_PORT}
            )
            return Refused(f"The prefill endpoint is refused: {', '.join(reasons)}", tuple(self._dropped))
        source = self._source()
        self._drop_if_present(wire.ENCODER_HOSTS_PORTS, "unsupported")
        rank = self._rank()
        local = self._address(rank)
        if remote := tuple(peer for peer in prefillers if peer.serving != local):
            return self._split(rank, remote, source)
        if prefillers:
            self._drop(wire.PREFILLER_HOST_PORT, "prefiller_is_self")
        return self._aggregated(rank, source, local)

    def _without_routing(self, reason: str) -> Aggregated:
        for name in wire.ROUTING_HEADERS:
            if name not in (wire.DECISION_ID, wire.ROUTING_AUTH, wire.LEG):
                self._drop_if_present(name, reason)
        return Aggregated(self._own.rank, dropped=tuple(self._dropped))

    def _aggregated(self, rank: int, source: Peer | None, local: HostPort | None) -> Aggregated:
        if source is not None and source.serving == local:
            self._drop(wire.KV_CACHE_SOURCE_HOST_PORT, "source_is_computing")
            source = None
        return Aggregated(rank, source, self._kv_request_id() if source else "", tuple(self._dropped))

    def _split(self, rank: int, prefillers: tuple[Peer, ...], source: Peer | None) -> PrefillDecode:
        if source is not None and source.serving == prefillers[0].serving:
            self._drop(wire.KV_CACHE_SOURCE_HOST_PORT, "source_is_computing")
        return PrefillDecode(rank, prefillers, source, self._kv_request_id(), tuple(self._dropped))

    def _kv_request_id(self) -> str:
        return self._make_id(self._headers.get(wire.DECISION_ID))

    def _prefillers(self, named: tuple[str, ...]) -> tuple[Peer, ...]:
        """The allowed prefillers in the order in which to try them, each once."""
        peers: dict[HostPort, Peer] = {}
        for text in named[:MAX_PREFILLERS]:
            peer = self._peer(wire.PREFILLER_HOST_PORT, text, roles=_PREFILL_ROLES)
            if peer is not None:
                peers.setdefault(peer.serving, peer)
        found = tuple(peers.values())
        if self._rules.sample_prefiller and len(found) > 1:
            start = zlib.crc32(self._headers.get(wire.REQUEST_ID, "").encode("utf-8", "replace")) % len(found)
            found = found[start:] + found[:start]
        return found

    def _source(self) -> Peer | None:
        named = values_of(self._headers, wire.KV_CACHE_SOURCE_HOST_PORT)
        if not named:
            return None
        if not self._rules.pull_enabled:
            self._drop(wire.KV_CACHE_SOURCE_HOST_PORT, "pull_disabled")
            return None
        if len(named) > 1:
            self._drop(wire.KV_CACHE_SOURCE_HOST_PORT, "ambiguous")
            return None
        return self._peer(wire.KV_CACHE_SOURCE_HOST_PORT, named[0], roles=None)

    def _rank(self) -> int:
        """Own rank, or the one that the older data-parallel header names on this pod."""
        text = self._headers.get(wire.DATA_PARALLEL_HOST_PORT)
        if text is None:
            return self._own.rank
        try:
            address = HostPort.parse(text)
            if address.host == self._own.host:
                return rank_of(address.port, self._rules.base_port, self._rules.ranks)
            reason = "not_this_pod"
        except EndpointError:
            reason = "malformed"
        except IdentityError:
            reason = "rank_out_of_range"
        self._drop(wire.DATA_PARALLEL_HOST_PORT, reason)
        return self._own.rank

    def _peer(self, header: str, text: str, *, roles: frozenset[str] | None) -> Peer | None:
        found = self._resolve(text, roles)
        if isinstance(found, Peer):
            return found
        self._drop(header, found)
        return None

    def _resolve(self, text: str, roles: frozenset[str] | None) -> Peer | str:
        """The peer at an address, or the reason against it."""
        try:
            address = HostPort.parse(text)
        except EndpointError:
            return "malformed"
        row = self._members.find(address)
        if row is not None:
            role = row.labels.get(_ROLE_LABEL)
            wrong = roles is not None and role is not None and role not in roles
            return "wrong_role" if wrong else Peer(address, row.p2p_port, row.rank)
        if self._members.enforced:
            return "not_allowed"
        try:
            rank = rank_of(address.port, self._rules.base_port, self._rules.ranks)
        except IdentityError:
            return "rank_out_of_range"
        return Peer(address, self._rules.p2p_base_port + rank, rank)

    def _address(self, rank: int) -> HostPort | None:
        """Serving address of a rank of this pod."""
        return HostPort(self._own.host, self._rules.base_port + rank) if self._own.host else None

    def _drop(self, header: str, reason: str) -> None:
        self._dropped.append(Dropped(header, reason))

    def _drop_if_present(self, header: str, reason: str) -> None:
        if header in self._headers:
            self._drop(header, reason)
