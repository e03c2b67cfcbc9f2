"""Sources, extractors, discovery and parsers: they configure shells and hold no policy. Names and defaults:
llm-d-router at ebab687.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from epp.plugins.parameters import DurationS, Parameters
from epp.plugins.plugin_type import Data, Kind, PluginType


class MetricsDataSourceParameters(Parameters):
    """Where an engine's metrics page is; what is absent is as the picker's flags have it. `port` absent: the
    endpoint's own metrics port."""

    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    port: int | None = Field(default=None, ge=1, le=65_535)
    insecure_skip_verify: bool = False
    ca_cert_path: str | None = None
    client_cert_path: str | None = None
    client_key_path: str | None = None
    interval: DurationS | None = Field(default=None, gt=0.0)  # absent: --refresh-metrics-interval


class CoreMetricsExtractorParameters(Parameters):
    """The page says itself which engine it is from: vLLM's and SGLang's names are both looked for."""

    engine_label_key: str | None = None
    default_engine: str | None = None
    engine_configs: list[dict[str, Any]] = Field(default_factory=list)


class FileDiscoveryParameters(Parameters):
    path: str
    watch_file: bool = True


_BY_NAME = "vLLM's and SGLang's metric names are both looked for on every page"
ROWS = (
    PluginType("endpoint-notification-source", Kind.SOURCE),
    PluginType(
        "metrics-data-source",
        Kind.SOURCE,
        MetricsDataSourceParameters,
    ),
    PluginType(
        "core-metrics-extractor",
        Kind.EXTRACTOR,
        CoreMetricsExtractorParameters,
        provides=Data.METRICS,
        ignored=dict.fromkeys(("engine_label_key", "default_engine", "engine_configs"), _BY_NAME),
    ),
    PluginType(
        "file-discovery",
        Kind.DISCOVERY,
        FileDiscoveryParameters,
        ignored={"watch_file": "the file is always watched"},
    ),
    PluginType("openai-parser", Kind.PARSER),
    PluginType("anthropic-parser", Kind.PARSER),
    PluginType("vllmhttp-parser", Kind.PARSER),
    PluginType("vllmgrpc-parser", Kind.PARSER),
    PluginType("passthrough-parser", Kind.PARSER),
)
