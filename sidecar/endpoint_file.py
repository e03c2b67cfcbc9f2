"""The static endpoint file: the pool's members without Kubernetes (format: docs/design.md).

The picker reads it for its endpoints and the sidecar for its allow-list, so that both see the same
rows and derive absent ports in the same way. A file is taken whole or not at all; watching it and
keeping the last good rows is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine_plugin import wire as engine_wire
from engine_plugin.identity import EndpointId, default_ports
from sidecar.endpoint import MAX_PORT, EndpointError, HostPort, canonical_host
from sidecar.yaml_text import YamlTextError, decode_text, load_yaml, read_text

MAX_FILE_BYTES = 8 << 20
MAX_PORT_DIGITS = 5
MAX_POD_CHARS = 253  # of a DNS name
_POD = re.compile(rf"[a-z0-9.-]{{1,{MAX_POD_CHARS}}}")
# the file of llm-d-router's file-discovery, whose ports are texts; a namespace changes nothing here
_REFERENCE_FIELDS = {"name": "pod", "address": "host", "port": "serving_port"}
_FIELDS = (
    "pod",
    "rank",
    "host",
    "serving_port",
    "metrics_port",
    "events_port",
    "replay_port",
    "p2p_port",
    "labels",
)


class EndpointFileError(ValueError):
    """The file cannot be used; the message names its path and, where there is one, the row."""


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """One endpoint (pod + rank) with every port filled in; `replay_port` 0 means no replay socket."""

    pod: str
    rank: int
    host: str
    serving_port: int
    metrics_port: int
    events_port: int
    replay_port: int
    p2p_port: int
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def id(self) -> EndpointId:
        """The endpoint's identity."""
        return EndpointId(self.pod, self.rank)

    @property
    def serving(self) -> HostPort:
        """The address that routing headers name."""
        return HostPort(self.host, self.serving_port)


def load_endpoint_file(
    path: str | Path, *, p2p_base_port: int = engine_wire.P2P_PORT
) -> tuple[EndpointRow, ...]:
    """Read and check the whole file.

    `p2p_base_port` is what a rank is added to where a row has no `p2p_port`.

    Raises:
        EndpointFileError: unreadable, not YAML or JSON, an unknown field, a bad value, or two rows
            with one identity or one serving address.
    """
    name = str(path)
    try:
        text = read_text(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise EndpointFileError(f"{name}: {error.strerror or error}") from error
    except YamlTextError as error:
        raise EndpointFileError(f"{name}: {error}") from error
    return _parse(text, name, p2p_base_port)


def parse_endpoint_rows(
    raw: bytes, name: str, *, p2p_base_port: int = engine_wire.P2P_PORT
) -> tuple[EndpointRow, ...]:
    """`load_endpoint_file` for bytes already read; `name` is used in messages only."""
    try:
        text = decode_text(raw)
    except YamlTextError as error:
        raise EndpointFileError(f"{name}: {error}") from error
    return _parse(text, name, p2p_base_port)


def _parse(text: str, name: str, p2p_base_port: int) -> tuple[EndpointRow, ...]:
    try:
        document = load_yaml(text, max_bytes=MAX_FILE_BYTES)
    except YamlTextError as error:
        raise EndpointFileError(f"{name}: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("endpoints"), list):
        raise EndpointFileError(f"{name}: the top level must be `endpoints:` with a list")
    if unknown := [str(key) for key in document if key != "endpoints"]:
        raise EndpointFileError(f"{name}: unknown field {unknown[0]!r}; allowed: endpoints")
    rows: list[EndpointRow] = []
    seen: dict[object, int] = {}
    for index, item in enumerate(document["endpoints"]):
        where = f"{name}: endpoints[{index}]"
        try:
            row = _row(item, p2p_base_port)
        except ValueError as error:
            raise EndpointFileError(f"{where}: {error}") from error
        for key, what in ((row.id, f"endpoint {row.id}"), (row.serving, f"serving address {row.serving}")):
            if key in seen:
                raise EndpointFileError(f"{where}: {what} is already endpoints[{seen[key]}]")
            seen[key] = index
        rows.append(row)
    return tuple(rows)


def _row(item: Any, p2p_base_port: int) -> EndpointRow:
    if not isinstance(item, dict):
        raise ValueError("must be a mapping")
    item = _in_our_words(item)
    if unknown := [str(key) for key in item if key not in _FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r}; allowed: {', '.join(_FIELDS)}")
    rank = _integer(item, "rank", 0, low=0)
    serving_port = _integer(item, "serving_port", None, low=1)
    ports = default_ports(rank)
    host = _text(item, "host")
    try:
        host = canonical_host(host)
    except EndpointError as error:
        raise ValueError(f"host: {error}") from error
    return EndpointRow(
        pod=_pod(item),
        rank=rank,
        host=host,
        serving_port=serving_port,
        metrics_port=_integer(item, "metrics_port", serving_port, low=1),
        events_port=_integer(item, "events_port", ports.events, low=1),
        replay_port=_integer(item, "replay_port", ports.replay, low=0),
        p2p_port=_integer(item, "p2p_port", p2p_base_port + rank, low=1),
        labels=_labels(item.get("labels")),
    )


def _in_our_words(item: dict[Any, Any]) -> dict[Any, Any]:
    """A row of the reference's file as one of ours; ours as it is."""
    if "name" not in item or "pod" in item:
        return item
    row = {_REFERENCE_FIELDS.get(key, key): value for key, value in item.items() if key != "namespace"}
    port = row.get("serving_port")
    if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= MAX_PORT_DIGITS:
        row["serving_port"] = int(port)
    return row


def _pod(item: dict[Any, Any]) -> str:
    """The name becomes a metric label and part of log lines, so it holds nothing that could forge one."""
    pod = _text(item, "pod")
    if not _POD.fullmatch(pod):
        raise ValueError(
            f"pod: must be 1 to {MAX_POD_CHARS} of a-z, 0-9, '.' and '-', not {pod[:MAX_POD_CHARS]!r}"
        )
    return pod


def _text(item: dict[Any, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: must be a non-empty text, not {value!r}")
    return value


def _integer(item: dict[Any, Any], key: str, default: int | None, *, low: int) -> int:
    value = item.get(key, default)
    if value is None:
        raise ValueError(f"{key}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_PORT:
        raise ValueError(f"{key}: must be a whole number in {low}..{MAX_PORT}, not {value!r}")
    return value


def _labels(value: Any) -> Mapping[str, str]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, dict):
        raise ValueError("labels: must be a mapping")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"labels: {key!r}: names and values must be texts (quote them)")
    return MappingProxyType(dict(value))
