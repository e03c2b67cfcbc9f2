"""From a file to what a picker is built of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from epp.config.document import MAX_FILE_BYTES, PluginRef, read_document
from epp.config.handlers import build_handler
from epp.config.instances import Instance, build_instances, only, resolve
from epp.config.profiles import build_profiles
from epp.config.wiring import (
    EXACT_TOKENS_NEEDED,
    P2P_PRODUCER,
    PRECISE_PRODUCER,
    check_consumers,
    with_tier_weights,
)
from epp.core.endpoint_picker import PickerSettings
from epp.core.errors import ConfigError
from epp.core.source_selector import SourceProducer
from epp.core.speculation import SpeculationSettings
from epp.plugins import producers
from epp.plugins.registry import Kind
from sidecar.yaml_text import YamlTextError, read_text


@dataclass(frozen=True, slots=True)
class EppConfig:
    """A configuration that can start. `notes` are sentences an operator should see at start."""

    settings: PickerSettings
    precise: producers.PrecisePrefixCacheProducerParameters | None
    speculation: SpeculationSettings | None  # None: speculativeIndexing is off
    tokens: producers.TokenProducerParameters | None
    discovery_path: str | None
    notes: tuple[str, ...]


def load_config(path: Path) -> EppConfig:
    """Raises ConfigError naming the file, the path inside it, and what is allowed."""
    try:
        text = read_text(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except YamlTextError as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_config(text, str(path))


def parse_config(text: str, origin: str = "config") -> EppConfig:
    """As `load_config`, from text."""
    document = read_document(text, origin)
    instances = with_tier_weights(build_instances(document, origin))
    profiles = build_profiles(document, instances, origin)
    precise = only(instances, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    source = only(instances, P2P_PRODUCER, producers.P2PSourceProducerParameters)
    tokens = only(instances, "token-producer", producers.TokenProducerParameters)
    check_consumers(instances, origin)
    if precise is not None and tokens is not None and tokens.estimate is not None:
        raise ConfigError(f"{origin}: token-producer only estimates tokens: {EXACT_TOKENS_NEEDED}")
    discovery = document.data_layer.discovery
    settings = PickerSettings(
        handler=build_handler(instances, profiles, origin),
        source_producer=SourceProducer(source.min_cached_token_delta) if source else None,
        base_models=_base_models(tokens),
    )
    return EppConfig(
        settings=settings,
        precise=precise,
        speculation=_speculation(precise),
        tokens=tokens,
        discovery_path=_discovery_path(instances, discovery, origin),
        notes=_notes(precise, source),
    )


def _base_models(tokens: producers.TokenProducerParameters | None) -> tuple[str, ...]:
    if tokens is None:
        return ()
    return (*([tokens.model_name] if tokens.model_name else []), *tokens.served_model_names)


def _speculation(
    precise: producers.PrecisePrefixCacheProducerParameters | None,
) -> SpeculationSettings | None:
    if precise is None or not precise.speculative_indexing:
        return None
    return SpeculationSettings(ttl_s=precise.speculative_ttl)


def _discovery_path(
    instances: Mapping[str, Instance], discovery: PluginRef | None, origin: str
) -> str | None:
    if discovery is None:
        return None
    instance = resolve(discovery.plugin_ref, instances, f"{origin}: dataLayer.discovery")
    if instance.row.kind is not Kind.DISCOVERY:
        raise ConfigError(f"{origin}: dataLayer.discovery: {instance.name} is a {instance.row.kind.value}")
    return cast(producers.FileDiscoveryParameters, instance.parameters).path


def _notes(
    precise: producers.PrecisePrefixCacheProducerParameters | None,
    source: producers.P2PSourceProducerParameters | None,
) -> tuple[str, ...]:
    notes: list[str] = []
    if source is None:
        notes.append("pulls are off: p2p-source-producer is not configured")
    elif source.min_cached_token_delta is None:
        notes.append(
            "p2p-source-producer sets no minCachedTokenDelta: no source is named until a PullThresholds "
            "document sets one (calibrate first)"
        )
    if precise is not None and precise.indexer_config.kv_block_index_config is not None:
        notes.append("indexerConfig.kvBlockIndexConfig is ignored: holders are never evicted by count")
    return tuple(notes)
