"""What a nixlv2 prefill answer may tell our own engine to do. Pure.

The decode leg carries the prefill answer's `kv_transfer_params` verbatim, and the engine opens a
connection to the address in it. So the answer is checked before it is believed: types, sizes, and a
host that is a member of the pool. What fails the check is a failed prefill, never a changed value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

import orjson

from engine_plugin import wire as engine_wire
from sidecar.endpoint import MAX_PORT
from sidecar.errors import PrefillParamsInvalid

MAX_PARAMS_BYTES: Final = 4 << 20
MAX_BLOCK_IDS: Final = 1 << 19  # 8M tokens in blocks of 16
MAX_ID_CHARS: Final = 256
MAX_DEPTH: Final = 8
_MAX_BLOCK_ID: Final = 1 << 40
_HOST: Final = re.compile(r"[0-9A-Za-z.:_-]{1,253}")
# a nixlv2 prefill answer names one place; these would name another (contracts section 3)
_FOREIGN: Final = (engine_wire.REMOTE_KV_SOURCE, engine_wire.REMOTE_PREFILLER, engine_wire.REMOTE_DECODER)


class Hosts(Protocol):
    """The pool as far as this check needs it."""

    @property
    def enforced(self) -> bool: ...

    def has_host(self, host: str | None) -> bool: ...


def check_prefill_params(params: Mapping[str, Any], hosts: Hosts) -> None:
    """Accept `params` of a prefill answer for the decode leg.

    Raises:
        PrefillParamsInvalid: which field is wrong; never its value.
    """
    for name in _FOREIGN:
        if params.get(name) is not None:
            raise PrefillParamsInvalid(f"names {name}")
    if params.get(engine_wire.DO_REMOTE_PREFILL) is not True:
        raise _wrong(engine_wire.DO_REMOTE_PREFILL)
    if params.get(engine_wire.DO_REMOTE_DECODE) not in (None, False):
        raise _wrong(engine_wire.DO_REMOTE_DECODE)
    _check_text(params, engine_wire.REMOTE_ENGINE_ID)
    for name in (engine_wire.KV_REQUEST_ID, "remote_request_id"):
        if params.get(name) is not None:
            _check_text(params, name)
    _check_address(params, hosts)
    if not _ids(params.get(engine_wire.REMOTE_BLOCK_IDS)):
        raise _wrong(engine_wire.REMOTE_BLOCK_IDS)
    if _depth(params) > MAX_DEPTH:
        raise PrefillParamsInvalid("is too large")
    try:
        size_bytes = len(orjson.dumps(params))
    except TypeError as error:  # a lone surrogate, an integer of more than 64 bits
        raise PrefillParamsInvalid("cannot be written again") from error
    if size_bytes > MAX_PARAMS_BYTES:
        raise PrefillParamsInvalid("is too large")


def _check_text(params: Mapping[str, Any], name: str) -> None:
    value = params.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS or not value.isprintable():
        raise _wrong(name)


def _check_address(params: Mapping[str, Any], hosts: Hosts) -> None:
    host, port = params.get(engine_wire.REMOTE_HOST), params.get(engine_wire.REMOTE_PORT)
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise _wrong(engine_wire.REMOTE_HOST)
    if hosts.enforced and not hosts.has_host(host):
        raise PrefillParamsInvalid(f"{engine_wire.REMOTE_HOST} is not a member of the pool")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= MAX_PORT:
        raise _wrong(engine_wire.REMOTE_PORT)


def _ids(value: Any) -> bool:
    """Block ids: one list, or one a KV cache group."""
    if not isinstance(value, list) or len(value) > MAX_BLOCK_IDS:
        return False
    groups = value if value and all(isinstance(item, list) for item in value) else [value]
    return sum(map(len, groups)) <= MAX_BLOCK_IDS and all(
        type(item) is int and 0 <= item <= _MAX_BLOCK_ID for group in groups for item in group
    )


def _depth(value: Any) -> int:
    """Levels of nesting, found without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if depth > MAX_DEPTH:
            break
    return depth


def _wrong(name: str) -> PrefillParamsInvalid:
    return PrefillParamsInvalid(f"{name} is missing or has a wrong form")
