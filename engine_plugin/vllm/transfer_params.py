"""`kv_transfer_params` as the tier understands them; the sidecar writes them, whatever else is ignored.

Malformed parameters are no error: the request is computed, and the reason is counted. Semantics: vLLM 0.32's
built-in p2p tier (`remote_kv_source`, `remote_prefiller`, `remote_decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine_plugin import wire
from engine_plugin.identity import Address

MAX_ID_CHARS: Final = 128  # a decision id is a uuid; ids go into reports


@dataclass(frozen=True, slots=True)
class Source:
    """Where this request's blocks may come from. `handed_over`: its own prefill leg, worth waiting for."""

    kv_request_id: str
    address: Address
    handed_over: bool


@dataclass(frozen=True, slots=True)
class TransferParams:
    """`supply_id`: this is a prefill leg whose blocks a decode leg will ask for under that id."""

    source: Source | None = None
    supply_id: str | None = None
    malformed: bool = False


def parse_transfer_params(params: Any) -> TransferParams:
    """Never raises."""
    if not isinstance(params, Mapping):
        return TransferParams(malformed=params is not None)
    prefiller, source = params.get(wire.REMOTE_PREFILLER), params.get(wire.REMOTE_KV_SOURCE)
    decoder = params.get(wire.REMOTE_DECODER)
    supply_id = _id(decoder)
    malformed = decoder is not None and supply_id is None
    if prefiller is not None and source is not None:
        return TransferParams(supply_id=supply_id, malformed=True)  # contracts: illegal together
    named = prefiller if prefiller is not None else source
    found = None
    if named is not None:
        kv_request_id, address = _id(named), _address(named)
        if kv_request_id is None or address is None:
            malformed = True
        else:
            found = Source(kv_request_id, address, handed_over=prefiller is not None)
    return TransferParams(found, supply_id, malformed)


def _id(leg: Any) -> str | None:
    value = leg.get(wire.KV_REQUEST_ID) if isinstance(leg, Mapping) else None
    ok = isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable()
    return value if ok else None


def _address(leg: Any) -> Address | None:
    if not isinstance(leg, Mapping):
        return None
    host, port = leg.get(wire.REMOTE_HOST), leg.get(wire.REMOTE_PORT)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536:
        return None
    return (host, port) if isinstance(host, str) and 0 < len(host) <= 255 else None
