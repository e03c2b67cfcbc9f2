"""The file as written: its shape, accepted groups and versions; unknown fields are errors with their path.

Format: llm-d-router at ebab687 (`llm-d.ai/v1alpha1`, older and newer groups accepted). It must not know what
a plugin does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from epp.core.errors import ConfigError
from epp.plugins.parameters import DurationS, Quantity, Weight
from sidecar.yaml_text import YamlTextError, load_yaml

API_VERSIONS = ("llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"
MAX_FILE_BYTES = 1 << 20


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


class Discovery(_Model):
    """`endpoints` is how `llm-d.ai/v1` writes it; it wins over the older `pluginRef`, as in the reference."""

    plugin_ref: str | None = None
    endpoints: PluginRef | None = None
    peers: PluginRef | None = None

    @property
    def endpoints_ref(self) -> str | None:
        """Name of the plugin that finds endpoints."""
        return self.endpoints.plugin_ref if self.endpoints else self.plugin_ref


class DataLayer(_Model):
    inject_defaults: bool = True
    sources: list[SourceEntry] = Field(default_factory=list)
    discovery: Discovery | None = None
    peer_discovery: PluginRef | None = None
    cross_replica_syncer_plugin_ref: str | None = None
    cross_replica_sync_interval: str | None = None
    cross_replica_publish_timeout: str | None = None
    cross_replica: dict[str, Any] | None = None


class BandEntry(_Model):
    """One priority band; the defaults of the reference."""

    priority: int | None = None
    max_bytes: Quantity = 1_000_000_000
    max_requests: Quantity = 5_000
    default_request_ttl: DurationS | None = Field(
        default=None, alias="defaultRequestTTL"
    )  # absent: flowControl's
    fairness_policy_ref: str | None = None
    ordering_policy_ref: str | None = None


class FlowControl(_Model):
    """Absent limits: none. Durations as Go writes them; `0s`: for ever."""

    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: DurationS = Field(default=60.0, alias="defaultRequestTTL")
    no_endpoint_request_ttl: DurationS | None = Field(default=None, alias="noEndpointRequestTTL")
    default_priority_band: BandEntry = Field(default_factory=BandEntry)
    default_negative_priority_band: BandEntry | None = None
    priority_bands: list[BandEntry] = Field(default_factory=list)
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: PluginRef | None = None
    enable_eviction: bool = False


class RequestHandler(_Model):
    parsers: list[PluginRef] = Field(default_factory=list)
    propagate_priority: bool = False


class Document(_Model):
    """The file as written. `saturationDetector` and `parser` at the top are the older places of what is in
    `flowControl` and `requestHandler` now."""

    api_version: str
    kind: str
    feature_gates: list[str] = Field(default_factory=list)
    plugins: list[PluginEntry] = Field(default_factory=list)
    scheduling_profiles: list[ProfileEntry] = Field(default_factory=list)
    data_layer: DataLayer = Field(default_factory=DataLayer)
    flow_control: FlowControl | None = None
    request_handler: RequestHandler = Field(default_factory=RequestHandler)
    saturation_detector: PluginRef | None = None
    parser: PluginRef | None = None

    @property
    def detector_ref(self) -> str | None:
        """Name of the saturation detector, wherever it is written."""
        new = self.flow_control.saturation_detector if self.flow_control else None
        ref = new or self.saturation_detector
        return ref.plugin_ref if ref else None

    @property
    def parser_refs(self) -> list[str]:
        refs = self.request_handler.parsers or ([self.parser] if self.parser else [])
        return [ref.plugin_ref for ref in refs]


def read_document(text: str, origin: str) -> Document:
    """Raises ConfigError: no YAML, another kind or version, an unknown field."""
    try:
        raw = load_yaml(text, max_bytes=MAX_FILE_BYTES)
    except YamlTextError as error:
        raise ConfigError(f"{origin}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: expected a mapping with apiVersion and kind")
    document = validated(Document, raw, origin)
    if document.api_version not in API_VERSIONS:
        raise ConfigError(
            f"{origin}: apiVersion {document.api_version!r}: allowed are {', '.join(API_VERSIONS)}"
        )
    if document.kind != KIND:
        raise ConfigError(f"{origin}: kind {document.kind!r}: allowed is {KIND}")
    return document


_M = TypeVar("_M", bound=BaseModel)


def validated(model: type[_M], raw: Mapping[str, Any], where: str) -> _M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            path = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(": ".join(filter(None, (where, path, message))) + _allowed(model, problem))
        raise ConfigError("\n".join(lines)) from error


def _allowed(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    if problem["type"] != "extra_forbidden" or len(problem["loc"]) != 1:
        return ""
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    return f" (allowed: {', '.join(names) or 'none'})"
