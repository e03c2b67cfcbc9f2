"""The few fields we keep of an object. Pure; a view never fails, whatever the object holds.

Texts that repeat in thousands of objects (label names and values) are interned: one copy of each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from sidecar.endpoint import MAX_PORT, EndpointError, canonical_host

ACTIVE_PORTS: Final = "llm-d.ai/active-ports"  # annotation of a pod: the ranks' ports that serve now
MAX_TARGET_PORTS: Final = 8
_ENDED: Final = ("Succeeded", "Failed")
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod as far as routing goes. `ip` "": it has none, or has ended and has given it back."""

    uid: str
    created: str  # RFC 3339 in UTC, so texts compare like times
    ip: str
    ready: bool
    deleting: bool
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS, hash=False)
    active_ports: frozenset[int] | None = None  # None: all of the pool's


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an InferencePool selects, and on which ports its pods serve: the index is the rank."""

    selector: Mapping[str, str] = field(hash=False)
    target_ports: tuple[int, ...]

    @property
    def label_selector(self) -> str:
        """As a list or watch takes it."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.selector.items()))


@dataclass(frozen=True, slots=True)
class InvalidPool:
    """A pool that cannot be used, and why."""

    reason: str


def view_pod(pod: Mapping[str, Any]) -> PodView:
    meta, status = _map(pod.get("metadata")), _map(pod.get("status"))
    return PodView(
        uid=str(meta.get("uid") or ""),
        created=sys.intern(str(meta.get("creationTimestamp") or "")),
        ip="" if status.get("phase") in _ENDED else _address(status.get("podIP")),
        ready=_is_ready(status.get("conditions")),
        deleting=bool(meta.get("deletionTimestamp")),
        labels=_labels(meta.get("labels")),
        active_ports=_ports(_map(meta.get("annotations")).get(ACTIVE_PORTS)),
    )


def view_pool(pool: Mapping[str, Any]) -> PoolSpec | InvalidPool:
    spec = _map(pool.get("spec"))
    selector = _labels(_map(spec.get("selector")).get("matchLabels"))
    if not selector:
        return InvalidPool("spec.selector.matchLabels is empty: it would select every pod of the namespace")
    entries = spec.get("targetPorts")
    ports = [_map(entry).get("number") for entry in entries] if isinstance(entries, list) else []
    return pool_spec(selector, ports)


def pool_spec(selector: Mapping[str, str], ports: list[Any]) -> PoolSpec | InvalidPool:
    """The rules that a server checks with CEL: 1 to 8 ports, no two alike."""
    if not 1 <= len(ports) <= MAX_TARGET_PORTS:
        return InvalidPool(f"spec.targetPorts has {len(ports)} entries; 1 to {MAX_TARGET_PORTS} are allowed")
    numbers = tuple(port for port in ports if _is_port(port))
    if len(numbers) != len(ports):
        return InvalidPool(f"spec.targetPorts: a number is not in 1..{MAX_PORT}")
    if len(set(numbers)) != len(numbers):
        return InvalidPool("spec.targetPorts: a number is there twice")
    return PoolSpec(selector, numbers)


def _is_ready(conditions: Any) -> bool:
    if not isinstance(conditions, list):
        return False
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in map(_map, conditions))


def _labels(labels: Any) -> Mapping[str, str]:
    """Only texts; a label that is something else cannot come from a real server."""
    found = {
        sys.intern(name): sys.intern(value)
        for name, value in _map(labels).items()
        if isinstance(name, str) and isinstance(value, str)
    }
    return MappingProxyType(found) if found else _NO_LABELS


def _address(ip: Any) -> str:
    try:
        return canonical_host(ip) if isinstance(ip, str) and ip else ""
    except EndpointError:
        return ""


def _ports(text: Any) -> frozenset[int] | None:
    """`8000,8002`; anything that is not a list of ports is as good as absent."""
    if not isinstance(text, str) or not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
        return None
    return frozenset(int(part) for part in parts)


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_PORT


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
