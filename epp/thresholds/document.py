"""One PullThresholds document: its schema, and refusals that name the path inside it.

apiVersion: kvpull/v1alpha1
kind: PullThresholds
spec:
  default:                       # all requests
    enabled: true
    minCachedTokenDelta: 2048    # tokens; above the measured crossover
    requireVerified: false       # true: engines that report no kvpull_engine_info are never sources
    inflightAwareness: true      # false: decisions exactly as the reference's
    maxInflightPulls: 8          # that one source serves at a time, all replicas together
    cost: {mode: threshold, marginMs: 0}
  overrides:                     # any of model, role (of the computing endpoint), sourceClass
  - match: {model: llama-70b, sourceClass: far}
    set: {minCachedTokenDelta: 8192}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from epp.core.errors import ConfigError
from epp.core.thresholds import EVERYWHERE, NO_SETTINGS, PullSettings, Scope
from sidecar.yaml_text import YamlTextError, load_yaml

API_VERSION = "kvpull/v1alpha1"
KIND = "PullThresholds"
MAX_DELTA_TOKENS = 2**31 - 1
MAX_INFLIGHT_PULLS = 1_000_000
MAX_MARGIN_MS = 600_000.0
MAX_OVERRIDES = 256  # of one document
MAX_DOCUMENT_BYTES = 1 << 16
_MAX_PROBLEMS = 8  # said of one document

_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=False)


class _Cost(_Model):
    mode: Literal["threshold", "cost"] | None = None
    margin_ms: float | None = Field(default=None, ge=0, le=MAX_MARGIN_MS, allow_inf_nan=False)


class _Settings(_Model):
    enabled: bool | None = None
    min_cached_token_delta: int | None = Field(default=None, ge=1, le=MAX_DELTA_TOKENS)
    require_verified: bool | None = None
    inflight_awareness: bool | None = None
    max_inflight_pulls: int | None = Field(default=None, ge=0, le=MAX_INFLIGHT_PULLS)
    cost: _Cost = Field(default_factory=_Cost)

    def value(self) -> PullSettings:
        return PullSettings(
            self.enabled,
            self.min_cached_token_delta,
            self.require_verified,
            self.inflight_awareness,
            self.max_inflight_pulls,
            self.cost.mode,
            self.cost.margin_ms,
        )


class _Match(_Model):
    model: _Name | None = None
    role: _Name | None = None
    source_class: _Name | None = None


class _Override(_Model):
    match: _Match
    set: _Settings


class _Spec(_Model):
    default: _Settings = Field(default_factory=_Settings)
    overrides: list[_Override] = Field(default_factory=list, max_length=MAX_OVERRIDES)


class _Document(_Model):
    api_version: str
    kind: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: _Spec


# where each setting stands below `default` or `set`, for messages
SETTING_PATHS: Mapping[str, str] = {
    "enabled": "enabled",
    "min_cached_token_delta": "minCachedTokenDelta",
    "require_verified": "requireVerified",
    "inflight_awareness": "inflightAwareness",
    "max_inflight_pulls": "maxInflightPulls",
    "mode": "cost.mode",
    "cost_margin_ms": "cost.marginMs",
}


@dataclass(frozen=True, slots=True)
class ThresholdDocument:
    """What one document sets, by scope, with the path of each scope's settings in it."""

    name: str
    rules: Mapping[Scope, PullSettings]
    paths: Mapping[Scope, str]


def parse_document(text: str, name: str) -> ThresholdDocument:
    """Raises ConfigError naming the document and the path inside it."""
    try:
        raw = load_yaml(text, max_bytes=MAX_DOCUMENT_BYTES)
    except YamlTextError as error:
        raise ConfigError(f"{name}: {error}") from error
    try:
        document = _Document.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MAX_PROBLEMS]
        raise ConfigError("; ".join(f"{name}: {_sentence(dict(p))}" for p in problems)) from error
    if (document.api_version, document.kind) != (API_VERSION, KIND):
        raise ConfigError(f"{name}: {document.api_version} {document.kind}: expected {API_VERSION} {KIND}")
    return _scopes(document.spec, name)


def _scopes(spec: _Spec, name: str) -> ThresholdDocument:
    rules: dict[Scope, PullSettings] = {}
    paths: dict[Scope, str] = {}
    default = spec.default.value()
    if default != NO_SETTINGS:
        rules[EVERYWHERE], paths[EVERYWHERE] = default, "spec.default"
    for number, override in enumerate(spec.overrides):
        path, match = f"spec.overrides.{number}", override.match
        scope = Scope(match.model, match.role, match.source_class)
        if scope == EVERYWHERE:
            raise ConfigError(
                f"{name}: {path}.match: empty; name one of model, role, sourceClass, or use spec.default"
            )
        if scope in rules:
            raise ConfigError(f"{name}: {path}.match: {scope} is matched by {paths[scope]} already")
        rules[scope], paths[scope] = override.set.value(), f"{path}.set"
    return ThresholdDocument(name, rules, paths)


def _sentence(problem: dict[str, Any]) -> str:
    """Path and what is wrong; for an unknown field also what is allowed there."""
    loc = problem["loc"]
    path = ".".join(map(str, loc)) or "document"
    if problem["type"] != "extra_forbidden":
        return f"{path}: {problem['msg']}"
    allowed = sorted(f.alias or n for n, f in _model_at(loc[:-1]).model_fields.items())
    return f"{path}: unknown field; allowed: {', '.join(allowed)}"


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that stands at `loc`, itself or as an element of a list."""
    model: Any = _Document
    for part in loc:
        if isinstance(part, str):
            annotation = next(f.annotation for f in model.model_fields.values() if f.alias == part)
            model = (get_args(annotation) or (annotation,))[0]
    found: type[BaseModel] = model
    return found
