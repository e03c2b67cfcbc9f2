"""Every plugin type we know, one row each, under the reference's names."""

from __future__ import annotations

from collections.abc import Mapping

from epp.plugins import (
    affinity_filter,
    data_layer,
    deciders,
    filters,
    flow_policies,
    load_scorers,
    lora_affinity,
    next_turn,
    no_hit_lru,
    pickers,
    predicted_ttft,
    prefix_scorer,
    producers,
    saturation,
    second_copy,
    session_affinity,
    topology,
)
from epp.plugins.not_supported import NOT_SUPPORTED
from epp.plugins.plugin_type import Data, Kind, PluginType

__all__ = ["DEFAULT_PRODUCERS", "NOT_SUPPORTED", "PLUGIN_TYPES", "Data", "Kind", "PluginType"]

_MODULES = (
    filters,
    affinity_filter,
    prefix_scorer,
    load_scorers,
    no_hit_lru,
    lora_affinity,
    session_affinity,
    topology,
    predicted_ttft,
    second_copy,
    pickers,
    deciders,
    producers,
    next_turn,
    data_layer,
    saturation,
    flow_policies,
)
PLUGIN_TYPES: Mapping[str, PluginType] = {row.type_name: row for module in _MODULES for row in module.ROWS}

# type that is added where a consumer finds no producer, as the reference does
DEFAULT_PRODUCERS: Mapping[Data, str] = {
    Data.PREFIX_MATCH: "approx-prefix-cache-producer",
    Data.INFLIGHT_LOAD: "inflight-load-producer",
    Data.TOKENS: "token-producer",
    Data.METRICS: "core-metrics-extractor",
    Data.TOPOLOGY: "topology-extractor",
}
