"""Where spans go and which: the standard OTEL_* environment variables, checked at start.

Source: OpenTelemetry specification, "SDK environment variables" and "OTLP exporter".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

DEFAULT_ENDPOINT: Final = "http://localhost:4318"
_TRACES_PATH: Final = "/v1/traces"
_RATIOS: Final = {"always_on": 1.0, "always_off": 0.0}
_RATIO_SAMPLER: Final = "traceidratio"
_PREFIX: Final = "parentbased_"  # all of ours are


class TracingError(ValueError):
    """A variable that cannot be followed; the message names it."""


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """`headers` may hold a secret: never shown."""

    url: str
    ratio: float
    resource: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_settings(env: Mapping[str, str], service: str) -> TracingSettings:
    """Settings of a process that calls itself `service` unless OTEL_SERVICE_NAME says otherwise.

    Raises:
        TracingError: a variable with a value that we cannot follow.
    """
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol == "grpc":
        raise TracingError(
            "OTEL_EXPORTER_OTLP_PROTOCOL: grpc is not supported; use the collector's OTLP/HTTP port (4318)"
        )
    url = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not url:
        url = (env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/") + _TRACES_PATH
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise TracingError("OTEL_EXPORTER_OTLP_ENDPOINT: expected a URL such as http://collector:4318")
    resource = {"service.name": service} | _pairs(env, "OTEL_RESOURCE_ATTRIBUTES")
    if env.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = env["OTEL_SERVICE_NAME"]
    return TracingSettings(url, _ratio(env), resource, _pairs(env, "OTEL_EXPORTER_OTLP_HEADERS"))


def _ratio(env: Mapping[str, str]) -> float:
    sampler = (env.get("OTEL_TRACES_SAMPLER") or "always_on").removeprefix(_PREFIX)
    if sampler in _RATIOS:
        return _RATIOS[sampler]
    if sampler != _RATIO_SAMPLER:
        known = ", ".join((*_RATIOS, _RATIO_SAMPLER))
        raise TracingError(f"OTEL_TRACES_SAMPLER: expected one of {known}, or parentbased_ and one")
    text = env.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise TracingError("OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1")
    return ratio


def _pairs(env: Mapping[str, str], name: str) -> dict[str, str]:
    """`key=value,...`, values percent-encoded."""
    found = {}
    for part in filter(None, map(str.strip, env.get(name, "").split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise TracingError(f"{name}: expected key=value,...")
        found[key.strip()] = unquote(value.strip())
    return found
