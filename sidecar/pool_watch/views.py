"""The few values we keep of an object, from its JSON. Pure. An object with a field of a wrong type raises
`msgspec.ValidationError`; no other content makes a view fail.

Texts that repeat in thousands of objects (label names and values) are interned: one copy of each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec

from sidecar.endpoint import MAX_PORT, EndpointError, canonical_host
from sidecar.pool_watch.objects import InferencePool, InferencePoolSpec, Pod, PodStatus

ACTIVE_PORTS: Final = "llm-d.ai/active-ports"  # annotation of a pod: the ranks' ports that serve now
MAX_TARGET_PORTS: Final = 8
_ENDED: Final = ("Succeeded", "Failed")
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_UNICAST_IPV4: Final = re.compile(
    rf"(?:22[0-3]|2[01][0-9]|1[0-9][0-9]|[1-9][0-9]?)\.{_OCTET}\.{_OCTET}\.{_OCTET}"
)
_read_pod = msgspec.json.Decoder(Pod).decode
_read_pool = msgspec.json.Decoder(InferencePool).decode
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


def view_pod(raw: msgspec.Raw | bytes) -> PodView:
    pod = _read_pod(raw)
    meta, status = pod.metadata, pod.status or PodStatus()
    annotations = meta.annotations or {}
    return PodView(
        uid=meta.uid or "",
        created=sys.intern(meta.created or ""),
        ip="" if status.phase in _ENDED else _address(status.ip),
        ready=any(c.type == "Ready" and c.status == "True" for c in status.conditions or ()),
        deleting=bool(meta.deleted),
        labels=_labels(meta.labels),
        active_ports=_ports(annotations.get(ACTIVE_PORTS)),
    )


def view_pool(raw: msgspec.Raw | bytes) -> PoolSpec | InvalidPool:
    spec = _read_pool(raw).spec or InferencePoolSpec()
    selector = _labels(spec.selector.labels if spec.selector else None)
    if not selector:
        return InvalidPool("spec.selector.matchLabels is empty: it would select every pod of the namespace")
    return pool_spec(selector, [port.number for port in spec.ports or ()])


def pool_spec(selector: Mapping[str, str], ports: Sequence[int]) -> PoolSpec | InvalidPool:
    """The rules that a server checks with schema and CEL: 1 to 8 ports, no two alike."""
    if not 1 <= len(ports) <= MAX_TARGET_PORTS:
        return InvalidPool(f"spec.targetPorts has {len(ports)} entries; 1 to {MAX_TARGET_PORTS} are allowed")
    if not all(1 <= port <= MAX_PORT for port in ports):
        return InvalidPool(f"spec.targetPorts: a number is not in 1..{MAX_PORT}")
    if len(set(ports)) != len(ports):
        return InvalidPool("spec.targetPorts: a number is there twice")
    return PoolSpec(selector, tuple(ports))


def _labels(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    if not labels:
        return _NO_LABELS
    return MappingProxyType({sys.intern(name): sys.intern(value) for name, value in labels.items()})


def _address(ip: str | None) -> str:
    if ip and _UNICAST_IPV4.fullmatch(ip):
        return ip  # its only spelling; 5,000 pods a list make the general way worth avoiding
    try:
        return canonical_host(ip) if ip else ""
    except EndpointError:
        return ""


def _ports(text: str | None) -> frozenset[int] | None:
    """`8000,8002`; anything that is not a list of ports is as good as absent."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
        return None
    return frozenset(int(part) for part in parts)
