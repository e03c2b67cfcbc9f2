"""One PullThresholds document: parse, refuse with the path inside it, merge several.

apiVersion: kvpull/v1alpha1
kind: PullThresholds
spec:
  default:
    enabled: true
    minCachedTokenDelta: 2048   # tokens; above the measured crossover
    requireVerified: false
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds
from sidecar.yaml_text import YamlTextError, load_yaml

API_VERSION = "kvpull/v1alpha1"
KIND = "PullThresholds"
MAX_DELTA_TOKENS = 2**31 - 1
MAX_DOCUMENT_BYTES = 1 << 16
_MAX_PROBLEMS = 8  # said of one document


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=False)


class _Default(_Model):
    enabled: bool | None = None
    min_cached_token_delta: int | None = Field(default=None, ge=1, le=MAX_DELTA_TOKENS)
    require_verified: bool | None = None


class _Spec(_Model):
    default: _Default = Field(default_factory=_Default)


class _Document(_Model):
    api_version: str
    kind: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: _Spec


def parse_thresholds(text: str, origin: str) -> PullThresholds:
    """Raises ConfigError naming `origin` and the path inside the document."""
    try:
        raw = load_yaml(text, max_bytes=MAX_DOCUMENT_BYTES)
    except YamlTextError as error:
        raise ConfigError(f"{origin}: {error}") from error
    try:
        document = _Document.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MAX_PROBLEMS]
        raise ConfigError(
            "; ".join(f"{origin}: {'.'.join(map(str, p['loc'])) or 'document'}: {p['msg']}" for p in problems)
        ) from error
    if (document.api_version, document.kind) != (API_VERSION, KIND):
        raise ConfigError(f"{origin}: {document.api_version} {document.kind}: expected {API_VERSION} {KIND}")
    default = document.spec.default
    return PullThresholds(default.enabled, default.min_cached_token_delta, default.require_verified)


def merge(documents: Iterable[PullThresholds]) -> PullThresholds:
    """Field by field; a later document wins where it sets a field."""
    merged = NO_THRESHOLDS
    for later in documents:
        merged = PullThresholds(
            _later(merged.enabled, later.enabled),
            _later(merged.min_cached_token_delta, later.min_cached_token_delta),
            _later(merged.require_verified, later.require_verified),
        )
    return merged


_T = TypeVar("_T")


def _later(ours: _T | None, theirs: _T | None) -> _T | None:
    return ours if theirs is None else theirs
