"""EndpointPickerConfig: read, refuse what is wrong with its path, and build the picker's settings.

Format: llm-d-router at ebab687 (`llm-d.ai/v1alpha1`, older and newer groups accepted). Unknown fields
and plugin types are errors. Wiring is explicit: a consumer is satisfied by the producer it names or
by the only one configured, never by another one in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from epp.core.disagg import DisaggProfileHandler, ProfileHandler, SingleProfileHandler
from epp.core.endpoint_picker import PickerSettings
from epp.core.errors import ConfigError
from epp.core.plugin import Filter, Picker, PrefillDecider, Scorer
from epp.core.scheduler import Profile
from epp.core.source_selector import SourceProducer
from epp.plugins import producers
from epp.plugins.parameters import Parameters, Weight
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.registry import PLUGIN_TYPES, Kind, PluginType
from epp.plugins.scorers import PrefixCacheScorer, TierWeights
from sidecar.yaml_text import YamlTextError, load_yaml, read_text

API_VERSIONS = ("llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"
PRECISE_PRODUCER = "precise-prefix-cache-producer"
P2P_PRODUCER = "p2p-source-producer"
MAX_FILE_BYTES = 1 << 20

_P = TypeVar("_P", bound=Parameters)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=False)


class PluginEntry(_Model):
    type: str
    name: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class PluginRef(_Model):
    plugin_ref: str
    weight: Weight = 1.0


class ProfileEntry(_Model):
    name: str
    plugins: list[PluginRef]


class SourceEntry(_Model):
    plugin_ref: str
    extractors: list[PluginRef] = Field(default_factory=list)


class DataLayer(_Model):
    inject_defaults: bool = True
    sources: list[SourceEntry] = Field(default_factory=list)
    discovery: PluginRef | None = None


class Document(_Model):
    """The file as written."""

    api_version: str
    kind: str
    feature_gates: list[str] = Field(default_factory=list)
    plugins: list[PluginEntry] = Field(default_factory=list)
    scheduling_profiles: list[ProfileEntry] = Field(default_factory=list)
    data_layer: DataLayer = Field(default_factory=DataLayer)


@dataclass(frozen=True, slots=True)
class _Instance:
    name: str
    row: PluginType
    parameters: Parameters
    object: object | None


@dataclass(frozen=True, slots=True)
class EppConfig:
    """A configuration that can start. `notes` are sentences an operator should see at start."""

    settings: PickerSettings
    precise: producers.PrecisePrefixCacheProducerParameters | None
    tokenizer_path: str | None
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
    document = _document(text, origin)
    instances = _instances(document, origin)
    profiles = _profiles(document, instances, origin)
    precise = _only(instances, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    source = _only(instances, P2P_PRODUCER, producers.P2PSourceProducerParameters)
    tokens = _only(instances, "token-producer", producers.TokenProducerParameters)
    _check_consumers(instances, origin)
    discovery = document.data_layer.discovery
    settings = PickerSettings(
        handler=_handler(instances, profiles, origin),
        source_producer=SourceProducer(source.min_cached_token_delta) if source else None,
    )
    return EppConfig(
        settings=settings,
        precise=precise,
        tokenizer_path=tokens.local.path if tokens and tokens.local else None,
        discovery_path=_discovery_path(instances, discovery, origin),
        notes=_notes(precise, source),
    )


def _document(text: str, origin: str) -> Document:
    try:
        raw = load_yaml(text, max_bytes=MAX_FILE_BYTES)
    except YamlTextError as error:
        raise ConfigError(f"{origin}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: expected a mapping with apiVersion and kind")
    document = _validated(Document, raw, origin)
    if document.api_version not in API_VERSIONS:
        raise ConfigError(
            f"{origin}: apiVersion {document.api_version!r}: allowed are {', '.join(API_VERSIONS)}"
        )
    if document.kind != KIND:
        raise ConfigError(f"{origin}: kind {document.kind!r}: allowed is {KIND}")
    return document


_M = TypeVar("_M", bound=BaseModel)


def _validated(model: type[_M], raw: Mapping[str, Any], where: str) -> _M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            path = ".".join(str(part) for part in problem["loc"])
            lines.append(f"{where}: {path}: {problem['msg']}" + _allowed(model, problem))
        raise ConfigError("\n".join(lines)) from error


def _allowed(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    if problem["type"] != "extra_forbidden" or len(problem["loc"]) != 1:
        return ""
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    return f" (allowed: {', '.join(names) or 'none'})"


def _instances(document: Document, origin: str) -> dict[str, _Instance]:
    instances: dict[str, _Instance] = {}
    for number, entry in enumerate(document.plugins):
        where = f"{origin}: plugins[{number}]"
        row = PLUGIN_TYPES.get(entry.type)
        if row is None:
            raise ConfigError(
                f"{where}: unknown type {entry.type!r}; known are {', '.join(sorted(PLUGIN_TYPES))}"
            )
        name = entry.name or entry.type
        if name in instances:
            raise ConfigError(f"{where}: the name {name!r} is taken; give this plugin a name of its own")
        parameters: Parameters = _validated(row.parameters, entry.parameters, f"{where} ({name}).parameters")
        built = row.build(name, parameters) if row.build else None
        instances[name] = _Instance(name, row, parameters, built)
    return _with_tier_weights(instances)


def _with_tier_weights(instances: dict[str, _Instance]) -> dict[str, _Instance]:
    """Give every prefix scorer the tier weights of the producer that feeds it."""
    precise = _only(instances, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    configured = precise.indexer_config.kv_cache_backend_configs if precise else []
    named = {backend.name: backend.weight for backend in configured}
    default = TierWeights()
    weights = TierWeights(named.get("gpu", default.device), named.get("cpu", default.cpu)) if named else None
    if weights is None:
        return instances
    return {
        name: replace(i, object=replace(i.object, weights=weights))
        if isinstance(i.object, PrefixCacheScorer)
        else i
        for name, i in instances.items()
    }


def _only(instances: Mapping[str, _Instance], type_name: str, model: type[_P]) -> _P | None:
    found = [i for i in instances.values() if i.row.type_name == type_name]
    if len(found) > 1:
        raise ConfigError(f"plugins: {type_name} is configured {len(found)} times; one is allowed")
    return cast(model, found[0].parameters) if found else None  # type: ignore[valid-type]


def _check_consumers(instances: Mapping[str, _Instance], origin: str) -> None:
    """Every consumer of prefix matches must be satisfied by the producer it names."""
    precise = [i.name for i in instances.values() if i.row.type_name == PRECISE_PRODUCER]
    for instance in instances.values():
        if instance.row.type_name not in ("prefix-cache-scorer", P2P_PRODUCER):
            continue
        wanted = getattr(instance.parameters, "prefix_match_info_producer_name", None)
        if wanted is not None and wanted not in precise:
            raise ConfigError(
                f"{origin}: {instance.name}.parameters.prefixMatchInfoProducerName: no producer named "
                f"{wanted!r}; configured are {', '.join(precise) or 'none'}"
            )
        if not precise:
            raise ConfigError(
                f"{origin}: {instance.name} needs prefix matches, but no {PRECISE_PRODUCER} is configured"
            )


def _profiles(document: Document, instances: Mapping[str, _Instance], origin: str) -> dict[str, Profile]:
    if not document.scheduling_profiles:
        raise ConfigError(f"{origin}: schedulingProfiles: at least one profile is needed")
    profiles: dict[str, Profile] = {}
    for number, entry in enumerate(document.scheduling_profiles):
        where = f"{origin}: schedulingProfiles[{number}] ({entry.name})"
        if entry.name in profiles:
            raise ConfigError(f"{where}: the name is taken")
        profiles[entry.name] = _profile(entry, instances, where)
    return profiles


def _profile(entry: ProfileEntry, instances: Mapping[str, _Instance], where: str) -> Profile:
    filters: list[Filter] = []
    scorers: list[tuple[Scorer, float]] = []
    chosen: list[Picker] = []
    names = [ref.plugin_ref for ref in entry.plugins]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{where}: {twice[0]} is listed twice; give it one weight")
    for ref in entry.plugins:
        instance = _resolve(ref.plugin_ref, instances, where)
        kind = instance.row.kind
        if kind is Kind.FILTER:
            filters.append(cast(Filter, instance.object))
        elif kind is Kind.SCORER:
            scorers.append((cast(Scorer, instance.object), ref.weight))
        elif kind is Kind.PICKER:
            chosen.append(cast(Picker, instance.object))
        else:
            raise ConfigError(
                f"{where}: {ref.plugin_ref} is a {kind.value}; a profile takes filters, scorers, a picker"
            )
    if len(chosen) > 1:
        raise ConfigError(f"{where}: {len(chosen)} pickers; one is allowed")
    picker = chosen[0] if chosen else MaxScorePicker("max-score-picker")
    return Profile(entry.name, tuple(filters), tuple(scorers), picker)


def _resolve(name: str, instances: Mapping[str, _Instance], where: str) -> _Instance:
    instance = instances.get(name)
    if instance is None:
        raise ConfigError(f"{where}: no plugin named {name!r}; configured are {', '.join(sorted(instances))}")
    return instance


def _handler(
    instances: Mapping[str, _Instance], profiles: Mapping[str, Profile], origin: str
) -> ProfileHandler:
    handlers = [i for i in instances.values() if i.row.kind is Kind.PROFILE_HANDLER]
    if len(handlers) > 1:
        raise ConfigError(
            f"{origin}: {' and '.join(h.name for h in handlers)}: one profile handler is allowed"
        )
    if handlers and handlers[0].row.type_name == "disagg-profile-handler":
        return _disagg(handlers[0], instances, profiles, origin)
    if len(profiles) != 1:
        raise ConfigError(f"{origin}: single-profile-handler takes one profile, found {', '.join(profiles)}")
    return SingleProfileHandler(next(iter(profiles.values())))


def _disagg(
    handler: _Instance, instances: Mapping[str, _Instance], profiles: Mapping[str, Profile], origin: str
) -> DisaggProfileHandler:
    parameters = cast(producers.DisaggProfileHandlerParameters, handler.parameters)
    where = f"{origin}: {handler.name}"
    decider = _resolve(parameters.deciders.prefill, instances, where)
    if decider.row.kind is not Kind.PREFILL_DECIDER:
        raise ConfigError(f"{where}.deciders.prefill: {decider.name} is a {decider.row.kind.value}")
    for name in (parameters.profiles.decode, parameters.profiles.prefill):
        if name not in profiles:
            raise ConfigError(f"{where}: no profile named {name!r}; configured are {', '.join(profiles)}")
    return DisaggProfileHandler(
        decode=profiles[parameters.profiles.decode],
        prefill=profiles[parameters.profiles.prefill],
        decider=cast(PrefillDecider, decider.object),
    )


def _discovery_path(
    instances: Mapping[str, _Instance], discovery: PluginRef | None, origin: str
) -> str | None:
    if discovery is None:
        return None
    instance = _resolve(discovery.plugin_ref, instances, f"{origin}: dataLayer.discovery")
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
