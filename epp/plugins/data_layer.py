"""Sources, extractors, discovery and parsers: they configure shells and hold no policy. Names and defaults:
llm-d-router at ebab687.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator
from pydantic.alias_generators import to_camel

from epp.plugins.metric_specs import EngineGauges, GaugeSpec, read_spec
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


# read on every page, whatever the configuration says
_OWN_SPECS = ("vllm:lora_requests_info", "vllm:cache_config_info", "sglang:cache_config_info")


class EngineConfig(Parameters):
    """Names of one kind of engine's gauges: `name` or `name{label=value}`."""

    name: str
    queued_requests_spec: str | None = None
    running_requests_spec: str | None = None
    kv_usage_spec: str | None = Field(
        default=None, validation_alias=AliasChoices("kvUsageSpec", "kvCacheUsageSpec")
    )
    lora_spec: str | None = None
    cache_info_spec: str | None = None
    cache_block_size_label_name: str | None = None
    cache_num_blocks_label_name: str | None = None
    cache_block_size_spec: str | None = None
    cache_num_blocks_spec: str | None = None
    custom_metrics: dict[str, Any] | list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _readable(self) -> EngineConfig:
        for text in (self.queued_requests_spec, self.running_requests_spec, self.kv_usage_spec):
            if text is not None:
                read_spec(text)
        for name, text in (("loraSpec", self.lora_spec), ("cacheInfoSpec", self.cache_info_spec)):
            if text is not None and text not in _OWN_SPECS:
                raise ValueError(f"{name}: {', '.join(_OWN_SPECS)} are read; take it out")
        for name in ("block_size_label_name", "num_blocks_label_name", "block_size_spec", "num_blocks_spec"):
            if getattr(self, f"cache_{name}") is not None:
                raise ValueError(
                    f"{to_camel('cache_' + name)}: cache sizes are read by vLLM's and SGLang's names"
                )
        if self.custom_metrics:
            raise ValueError("customMetrics: nothing reads them; take them out")
        return self


class CoreMetricsExtractorParameters(Parameters):
    """The page says itself which engine it is from: vLLM's and SGLang's names are looked for on every page,
    and those of `engineConfigs`, which win."""

    engine_label_key: str | None = None
    default_engine: str | None = None
    engine_configs: list[EngineConfig] = Field(default_factory=list)

    @property
    def gauges(self) -> EngineGauges:
        """What `engineConfigs` adds."""
        return EngineGauges(*(tuple(self._specs(name)) for name in _SPECS))

    def _specs(self, name: str) -> Iterator[GaugeSpec]:
        for engine in self.engine_configs:
            text = getattr(engine, name)
            if text is not None:
                yield read_spec(text)


_SPECS = ("queued_requests_spec", "running_requests_spec", "kv_usage_spec")


class FileDiscoveryParameters(Parameters):
    path: str
    watch_file: bool = True


_BY_NAME = "the names of all engines are looked for on every page"
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
        ignored=dict.fromkeys(("engine_label_key", "default_engine"), _BY_NAME),
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
