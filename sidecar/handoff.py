"""What both legs of a request carry, where they go out at once: one function a connector. Pure.

`offloading`   the decode engine fetches from the prefiller's P2P port under one id.
`sglang`       both bodies name the prefiller's bootstrap server and one room (experimental: the reference's
               form, not run against an engine).
What a connector adds belongs to the sidecar: a client that sends it is not heard (`OWNED`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine_plugin import wire as engine_wire
from sidecar import kv_params
from sidecar.plan import Connector, Peer

BOOTSTRAP_HOST: Final = "bootstrap_host"
BOOTSTRAP_PORT: Final = "bootstrap_port"
BOOTSTRAP_ROOM: Final = "bootstrap_room"
_KV: Final = (engine_wire.KV_TRANSFER_PARAMS,)
OWNED: Final[Mapping[Connector, tuple[str, ...]]] = {
    Connector.OFFLOADING: _KV,
    Connector.NIXLV2: _KV,
    Connector.SGLANG: (*_KV, BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM),
}


@dataclass(frozen=True, slots=True)
class Handoff:
    """Members to add to the body of either leg."""

    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]


def offloading(kv_request_id: str, prefiller: Peer) -> Handoff:
    """Contracts section 3, row P/D `offloading`."""
    host, port = prefiller.serving.host, prefiller.p2p_port
    return Handoff(
        prefill={engine_wire.KV_TRANSFER_PARAMS: kv_params.offloading_prefill_params(kv_request_id, None)},
        decode={
            engine_wire.KV_TRANSFER_PARAMS: kv_params.offloading_decode_params(kv_request_id, host, port)
        },
    )


def sglang(prefiller: Peer, bootstrap_port: int) -> Handoff:
    """The room is drawn by chance, so that no one can guess another request's."""
    members = {
        BOOTSTRAP_HOST: prefiller.serving.host,
        BOOTSTRAP_PORT: bootstrap_port,
        BOOTSTRAP_ROOM: secrets.randbits(63),
    }
    return Handoff(prefill=members, decode=members)
