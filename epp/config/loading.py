"""From a file to what a picker is built of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epp.config.data_layer import check_data_layer, discovery_path
from epp.config.defaults import missing_defaults, with_default_profile
from epp.config.document import MAX_FILE_BYTES, Document, read_document
from epp.config.explanation import Explanation, explain
from epp.config.flow import Admission, build_admission, flow_defaults
from epp.config.gates import FLOW_CONTROL, read_gates
from epp.config.handlers import build_handler
from epp.config.instances import Configured, Instance, build, only, read_plugins
from epp.config.notes import notes_of
from epp.config.profiles import build_profiles
from epp.config.settings import build_settings
from epp.config.wiring import EXACT_TOKENS_NEEDED, PRECISE_PRODUCER, Wiring, inputs_of, wire
from epp.core.endpoint_picker import PickerSettings
from epp.core.errors import ConfigError
from epp.core.flow.bands import FlowSettings
from epp.core.plugin import SaturationDetector
from epp.core.speculation import SpeculationSettings
from epp.plugins import producers
from epp.plugins.data_layer import CoreMetricsExtractorParameters, MetricsDataSourceParameters
from epp.plugins.metric_specs import NO_MORE_GAUGES, EngineGauges
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
    admission: Admission | None = None  # None: nothing is ever refused for load
    metrics_source: MetricsDataSourceParameters | None = None
    engine_gauges: EngineGauges = NO_MORE_GAUGES
    explanation: Explanation | None = field(default=None, repr=False)
    instances: Mapping[str, Instance] = field(default_factory=dict, repr=False, compare=False)
    fixed: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # read once, at start
    text: str = field(default="", repr=False, compare=False)  # as it was read

    @property
    def flow(self) -> FlowSettings | None:
        """Of the queues in front of the scheduler; None: the gate is off."""
        return self.admission.flow if self.admission else None

    @property
    def detector(self) -> SaturationDetector | None:
        """None: nothing is ever refused for load."""
        return self.admission.detector if self.admission else None


def load_config(path: Path) -> EppConfig:
    """Raises ConfigError naming the file, the path inside it, and what is allowed."""
    return parse_config(read_config_text(path), str(path))


def read_config_text(path: Path) -> str:
    """Raises ConfigError: it cannot be read, or is no text."""
    try:
        return read_text(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except YamlTextError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(text: str, origin: str = "config", before: EppConfig | None = None) -> EppConfig:
    """As `load_config`, from text. Plugins that are as they were in `before` are taken over with what they
    remember."""
    document, added = with_default_profile(read_document(text, origin))
    gates = read_gates(document.feature_gates, origin)
    plugins = read_plugins(document, origin)
    plugins |= missing_defaults(document, plugins)
    plugins |= flow_defaults(document, plugins, gates[FLOW_CONTROL])
    wiring = wire(plugins, origin, inject_defaults=document.data_layer.inject_defaults)
    precise = only(wiring.plugins, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    tokens = only(plugins, "token-producer", producers.TokenProducerParameters)
    if precise is not None and tokens is not None and tokens.estimate is not None:
        raise ConfigError(f"{origin}: token-producer only estimates tokens: {EXACT_TOKENS_NEEDED}")
    instances = _build_all(wiring, before)
    check_data_layer(document, instances, origin)
    handler = build_handler(instances, build_profiles(document, instances, origin), origin)
    notes = (*added, *notes_of(document, wiring, handler, gates[FLOW_CONTROL]))
    admission = build_admission(document, instances, gates[FLOW_CONTROL], origin)
    return EppConfig(
        settings=build_settings(wiring, instances, handler, tokens),
        precise=precise,
        speculation=_speculation(precise),
        tokens=tokens,
        discovery_path=discovery_path(document, instances, origin),
        notes=notes,
        admission=admission,
        metrics_source=only(wiring.plugins, "metrics-data-source", MetricsDataSourceParameters),
        engine_gauges=_engine_gauges(wiring),
        explanation=explain(wiring, handler, gates, notes),
        instances=instances,
        fixed=_fixed(document, wiring, gates) | {"flowControl": admission},
        text=text,
    )


def _engine_gauges(wiring: Wiring) -> EngineGauges:
    extractor = only(wiring.plugins, "core-metrics-extractor", CoreMetricsExtractorParameters)
    return extractor.gauges if extractor else NO_MORE_GAUGES


def _build_all(wiring: Wiring, before: EppConfig | None) -> dict[str, Instance]:
    known = before.instances if before else {}
    built: dict[str, Instance] = {}
    for name, configured in wiring.plugins.items():
        inputs = inputs_of(wiring, configured)
        old = known.get(name)
        same = old is not None and (old.row, old.parameters, old.inputs) == (
            configured.row,
            configured.parameters,
            inputs,
        )
        built[name] = old if same and old is not None else build(configured, inputs)
    return built


def _speculation(
    precise: producers.PrecisePrefixCacheProducerParameters | None,
) -> SpeculationSettings | None:
    if precise is None or not precise.speculative_indexing:
        return None
    return SpeculationSettings(ttl_s=precise.speculative_ttl)


# plugins that are read once, at start: what they configure are sockets, threads and tables
_READ_ONCE = (
    PRECISE_PRODUCER,
    "approx-prefix-cache-producer",
    "token-producer",
    "metrics-data-source",
    "core-metrics-extractor",
    "file-discovery",
)


def _fixed(document: Document, wiring: Wiring, gates: Mapping[str, bool]) -> dict[str, Any]:
    """What a running picker cannot change, by path inside the document."""
    found: dict[str, Any] = {
        f"plugins.{plugin.name}": (plugin.row.type_name, plugin.parameters)
        for plugin in wiring.plugins.values()
        if plugin.row.type_name in _READ_ONCE and not _is_default_scrape(plugin)
    }
    found["dataLayer"] = document.data_layer
    found["requestHandler"] = document.request_handler
    found["featureGates"] = dict(gates)
    return found


def _is_default_scrape(plugin: Configured) -> bool:
    """Engines are scraped whether somebody asks for it or not."""
    scrapes = plugin.row.type_name in ("metrics-data-source", "core-metrics-extractor")
    return scrapes and not plugin.parameters.model_fields_set
