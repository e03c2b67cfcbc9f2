"""`dataLayer` and `requestHandler`: every reference leads somewhere; what has no effect is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from epp.config.document import Document
from epp.config.instances import Instance, resolve
from epp.core.errors import ConfigError
from epp.plugins.data_layer import FileDiscoveryParameters
from epp.plugins.registry import Kind

_REPLICAS = "replicas exchange nothing but snapshots of the index (--sibling); take it out"


def check_data_layer(document: Document, instances: Mapping[str, Instance], origin: str) -> None:
    """Raises ConfigError: a reference that leads to nothing, or to a plugin of another kind."""
    where = f"{origin}: dataLayer"
    layer = document.data_layer
    for name, value in (
        ("discovery.peers", layer.discovery.peers if layer.discovery else None),
        ("peerDiscovery", layer.peer_discovery),
        ("crossReplicaSyncerPluginRef", layer.cross_replica_syncer_plugin_ref),
        ("crossReplicaSyncInterval", layer.cross_replica_sync_interval),
        ("crossReplicaPublishTimeout", layer.cross_replica_publish_timeout),
        ("crossReplica", layer.cross_replica),
    ):
        if value is not None:
            raise ConfigError(f"{where}.{name} is not part of kvpull: {_REPLICAS}")
    for number, source in enumerate(layer.sources):
        path = f"{where}.sources[{number}]"
        _check_kind(source.plugin_ref, (Kind.SOURCE,), instances, path)
        for extractor in source.extractors:
            _check_kind(extractor.plugin_ref, (Kind.EXTRACTOR, Kind.PRODUCER), instances, path)
    if document.request_handler.propagate_priority:
        raise ConfigError(
            f"{origin}: requestHandler.propagatePriority is not part of kvpull: priorities decide in the "
            "picker's queue (flowControl); take it out"
        )
    for name in document.parser_refs:
        _check_kind(name, (Kind.PARSER,), instances, f"{origin}: requestHandler.parsers")


def _check_kind(name: str, kinds: tuple[Kind, ...], instances: Mapping[str, Instance], where: str) -> None:
    found = resolve(name, instances, where)
    if found.row.kind not in kinds:
        raise ConfigError(f"{where}: {name} is a {found.row.kind.value}")


def discovery_path(document: Document, instances: Mapping[str, Instance], origin: str) -> str | None:
    """Path of the endpoint file; None: not from a file. Raises ConfigError."""
    discovery = document.data_layer.discovery
    if discovery is None:
        return None
    where = f"{origin}: dataLayer.discovery"
    ref = discovery.endpoints_ref
    if ref is None:
        raise ConfigError(f"{where}: endpoints.pluginRef is missing")
    _check_kind(ref, (Kind.DISCOVERY,), instances, where)
    return cast(FileDiscoveryParameters, instances[ref].parameters).path
