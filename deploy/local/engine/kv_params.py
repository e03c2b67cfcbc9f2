"""`kv_transfer_params` of a request body: what the engine is to fetch or to supply. Pure.

Two connectors share one body field: `remote_*` (offloading) and `do_remote_*` (nixlv2). A
contradiction is the client's fault (400); a source that cannot be understood is ignored and named
in the report, because a pull never makes a request fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_plugin import wire

Address = tuple[str, int]


class IllegalTransfer(ValueError):
    """The fields contradict each other."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where to fetch blocks, and under which id. `supply_wait` says that the blocks may still be in
    the making there (P/D decode leg of the offloading connector)."""

    address: Address
    kv_request_id: str
    handed_over: bool = False  # counts as P/D hand-over, not as pull
    supply_wait: bool = False


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What the body asked for, understood."""

    source: Source | None = None
    supply_id: str | None = None  # prefill leg: announce the prompt's blocks under this id
    answers_with_params: bool = False  # nixlv2 prefill leg: the response names where to fetch
    malformed: str | None = None  # a source was named but cannot be used: why

    @property
    def is_prefill_leg(self) -> bool:
        return self.supply_id is not None or self.answers_with_params


NO_TRANSFER = TransferParams()
# what vLLM's branch called the keys before it named them for the remote party (llm-d-router#2133)
OLD_KEYS: Mapping[str, str] = {
    "p2p": wire.REMOTE_KV_SOURCE,
    "prefill": wire.REMOTE_PREFILLER,
    "decode": wire.REMOTE_DECODER,
}


def read_as_old_engine(body: dict[str, Any]) -> dict[str, Any]:
    """The body as an engine with the old keys takes it: today's keys mean nothing to it."""
    params = body.get(wire.KV_TRANSFER_PARAMS)
    if not isinstance(params, Mapping):
        return body
    known = {OLD_KEYS[key]: value for key, value in params.items() if key in OLD_KEYS}
    return {**body, wire.KV_TRANSFER_PARAMS: known}


def parse_transfer(params: Any) -> TransferParams:
    """Meaning of the body's field (None where absent).

    Raises:
        IllegalTransfer: not an object, or keys that exclude each other.
    """
    if params is None:
        return NO_TRANSFER
    if not isinstance(params, Mapping):
        raise IllegalTransfer(f"{wire.KV_TRANSFER_PARAMS} must be an object")
    _refuse_contradictions(params)
    supply_id = None
    decoder = params.get(wire.REMOTE_DECODER)
    if decoder is not None:
        supply_id = _request_id(decoder)
        if supply_id is None:
            return TransferParams(malformed=f"{wire.REMOTE_DECODER}.{wire.KV_REQUEST_ID}")
    source, malformed = _source(params)
    return TransferParams(
        source=source,
        supply_id=supply_id,
        answers_with_params=params.get(wire.DO_REMOTE_DECODE) is True,
        malformed=malformed,
    )


def _refuse_contradictions(params: Mapping[str, Any]) -> None:
    named = {
        key for key in (wire.REMOTE_KV_SOURCE, wire.REMOTE_PREFILLER, wire.REMOTE_DECODER) if params.get(key)
    }
    named |= {key for key in (wire.DO_REMOTE_DECODE, wire.DO_REMOTE_PREFILL) if params.get(key) is True}
    for first, second in (
        (wire.REMOTE_PREFILLER, wire.REMOTE_KV_SOURCE),
        (wire.REMOTE_PREFILLER, wire.REMOTE_DECODER),
        (wire.DO_REMOTE_PREFILL, wire.DO_REMOTE_DECODE),
        (wire.DO_REMOTE_PREFILL, wire.REMOTE_KV_SOURCE),
        (wire.DO_REMOTE_PREFILL, wire.REMOTE_PREFILLER),
    ):
        if first in named and second in named:
            raise IllegalTransfer(f"{wire.KV_TRANSFER_PARAMS}: {first} and {second} exclude each other")


def _source(params: Mapping[str, Any]) -> tuple[Source | None, str | None]:
    """The one place to fetch from, or why the named one cannot be used."""
    if params.get(wire.DO_REMOTE_PREFILL) is True:
        return _parse_source(params, wire.DO_REMOTE_PREFILL, handed_over=True, supply_wait=False)
    prefiller = params.get(wire.REMOTE_PREFILLER)
    if prefiller is not None:
        return _parse_source(prefiller, wire.REMOTE_PREFILLER, handed_over=True, supply_wait=True)
    source = params.get(wire.REMOTE_KV_SOURCE)
    if source is not None:
        return _parse_source(source, wire.REMOTE_KV_SOURCE, handed_over=False, supply_wait=False)
    return None, None


def _parse_source(
    value: Any, key: str, *, handed_over: bool, supply_wait: bool
) -> tuple[Source | None, str | None]:
    request_id = _request_id(value)
    if request_id is None:
        return None, f"{key}.{wire.KV_REQUEST_ID}"
    host, port = value.get(wire.REMOTE_HOST), value.get(wire.REMOTE_PORT)
    if not isinstance(host, str) or not host:
        return None, f"{key}.{wire.REMOTE_HOST}"
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        return None, f"{key}.{wire.REMOTE_PORT}"
    return Source((host, port), request_id, handed_over, supply_wait), None


def _request_id(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    request_id = value.get(wire.KV_REQUEST_ID)
    return request_id if isinstance(request_id, str) and 0 < len(request_id) <= 256 else None
