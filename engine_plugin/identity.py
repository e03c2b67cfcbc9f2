"""Identity, once: an *endpoint* is pod + rank, and its ports follow from its row or its rank.

Standard library only, so that the index, the sidecar, the metrics and the chart can all use this
one place. Two places that derive ranks and ports differently are the most common public fault of
this kind of system (contracts section 7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine_plugin import wire


class IdentityError(ValueError):
    """An address or rank that cannot belong to the pool; never mapped to rank 0 instead."""


class EndpointId(NamedTuple):
    """One engine rank: the pod's name and the data-parallel rank in it.

    A tuple, because it is the key of every table on the hot path: its hash costs a tenth of a
    dataclass's, which is recomputed in Python at every look-up.
    """

    pod: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.pod}/{self.rank}"


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """TCP ports of one rank: KV events (PUB), replay (ROUTER), peer-to-peer control."""

    events: int
    replay: int
    p2p: int


def rank_of(serving_port: int, base_port: int, ranks: int) -> int:
    """Rank that serves on `serving_port`.

    Raises:
        IdentityError: the port is outside `[base_port, base_port + ranks)`.
    """
    rank = serving_port - base_port
    if not 0 <= rank < ranks:
        raise IdentityError(
            f"serving port {serving_port} is not one of the {ranks} rank ports from {base_port}"
        )
    return rank


def default_ports(rank: int) -> EnginePorts:
    """Ports of `rank` when its row does not name them: 5557+r, 5657+r, 7777+r."""
    if rank < 0:
        raise IdentityError(f"rank {rank} is negative")
    return EnginePorts(wire.EVENTS_PORT + rank, wire.REPLAY_PORT + rank, wire.P2P_PORT + rank)


def fingerprint(value: str | bytes) -> str:
    """16 hex digits that stand for a secret or long value (hash seed, model revision, layout)."""
    raw = value.encode() if isinstance(value, str) else value
    return hashlib.sha256(b"kvpull-fp\0" + raw).hexdigest()[:16]


Address = tuple[str, int]  # host, port


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What two peers must agree on before a block of one means anything to the other.

    `instance` is new at every start (uuid4 hex), so an old self is never taken for a peer. `seed_fp`
    and `revision` travel as given: pass a fingerprint where the value is secret.
    """

    instance: str
    rank: int
    model: str
    revision: str
    block_size_tokens: int
    block_bytes: int
    dtype: str
    layout: str
    tp_size: int
    hash_algo: str
    seed_fp: str

    def mismatch(self, other: PeerIdentity) -> str | None:
        """Name of the first field on which the peers must agree and do not; None if they agree."""
        for name in COMPARED_FIELDS:
            if getattr(self, name) != getattr(other, name):
                return name
        return "instance" if self.instance == other.instance else None

    def info_labels(
        self, *, p2p_addr: Address, events_port: int, replay_port: int, reports_port: int = 0
    ) -> Mapping[str, str]:
        """Labels of `kvpull_engine_info` (names: `wire.ENGINE_INFO_LABELS`)."""
        layout = "/".join((self.layout, self.dtype, str(self.block_bytes), str(self.tp_size)))
        return {
            "instance": self.instance,
            "rank": str(self.rank),
            "p2p_addr": format_address(p2p_addr),
            "events_port": str(events_port),
            "replay_port": str(replay_port),
            "reports_port": str(reports_port),
            "block_size": str(self.block_size_tokens),
            "hash_algo": self.hash_algo,
            "seed_fp": self.seed_fp,
            "model_fp": fingerprint(f"{self.model}@{self.revision}"),
            "layout_fp": fingerprint(layout),
            "protocol": str(wire.P2P_PROTOCOL_VERSION),
        }


COMPARED_FIELDS: tuple[str, ...] = (
    "model",
    "revision",
    "block_size_tokens",
    "block_bytes",
    "dtype",
    "layout",
    "tp_size",
    "hash_algo",
    "seed_fp",
)


def format_address(address: Address) -> str:
    """`host:port`, an IPv6 host in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
