"""What both legs of a request carry, where they go out at once: one function a connector. Pure.

`offloading`   the decode engine fetches from the prefiller's P2P port under one id.
`sglang`       both bodies name the prefiller's bootstrap server and one room (experimental: the reference's
               form, not run against an engine).
`mooncake`     both legs name one transfer, the decode leg also the prefiller's bootstrap server and engine
               (experimental, likewise).
What a connector adds belongs to the sidecar: a client that sends it is not heard (`OWNED`).
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine_plugin import wire as engine_wire
from sidecar import kv_params
from sidecar.endpoint import HostPort
from sidecar.plan import Connector, Peer

BOOTSTRAP_HOST: Final = "bootstrap_host"
BOOTSTRAP_PORT: Final = "bootstrap_port"
BOOTSTRAP_ROOM: Final = "bootstrap_room"
_KV: Final = (engine_wire.KV_TRANSFER_PARAMS,)
OWNED: Final[Mapping[Connector, tuple[str, ...]]] = {
    Connector.OFFLOADING: _KV,
    Connector.NIXLV2: _KV,
    Connector.MOONCAKE: _KV,
    Connector.SGLANG: (*_KV, BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM),
}


@dataclass(frozen=True, slots=True)
class Handoff:
    """Members to add to the body of either leg, and headers of the prefill leg."""

    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


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


def mooncake(prefiller: Peer, bootstrap: HostPort, engine_id: str) -> Handoff:
    """`engine_id` is that of the prefiller's rank, which its leg is sent to by header."""
    transfer_id = f"xfer-{uuid.uuid4()}"
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": f"http://{bootstrap}",
        "remote_engine_id": engine_id,
    }
    return Handoff(
        prefill={engine_wire.KV_TRANSFER_PARAMS: prefill},
        decode={engine_wire.KV_TRANSFER_PARAMS: decode},
        headers={"X-data-parallel-rank": str(prefiller.rank)},
    )
