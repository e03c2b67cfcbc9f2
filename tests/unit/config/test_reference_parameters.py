"""Every parameter that llm-d-router's plugins have (its configuration structs at ebab687) is known here."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import AliasChoices

from epp.config import EppConfig, parse_config
from epp.core.disagg import DisaggProfileHandler
from epp.core.errors import ConfigError
from epp.core.flow.bands import BandSettings, Fairness
from epp.plugins.registry import PLUGIN_TYPES
from epp.plugins.saturation import ConcurrencyDetector

PREFIX, LOAD = "prefixMatchInfoProducerName", "inFlightLoadProducerName"
AFFINITY = "strategy encodedEndpointHeaderConfig sessionIdConfig profileName"
REFERENCE = {
    "active-request-scorer": f"requestTimeout idleThreshold maxBusyScore {LOAD}",
    "agent-identity": "additionalSessionHeaders",
    "approx-prefix-cache-producer": "autoTune blockSizeTokens blockSize maxPrefixBlocksToMatch "
    "maxPrefixTokensToMatch lruCapacityPerServer",
    "concurrency-detector": f"maxConcurrency headroom concurrencyMode maxTokenConcurrency {LOAD}",
    "core-metrics-extractor": "engineLabelKey defaultEngine engineConfigs",
    "data-parallel-profile-handler": "primaryPort",
    "disagg-profile-handler": "stageOrder profiles deciders",
    "file-discovery": "path watchFile",
    "inflight-load-producer": "addEstimatedOutputTokens outputRatio maxEstimatedOutputTokens "
    f"{PREFIX} syncCrossReplicaState",
    "label-selector-filter": "matchLabels matchExpressions",
    "load-aware-scorer": "threshold",
    "max-score-picker": "maxNumOfEndpoints",
    "metrics-data-source": "scheme path port insecureSkipVerify caCertPath clientCertPath clientKeyPath "
    "interval",
    "no-hit-lru-scorer": f"prefixPluginType prefixPluginName lruSize {PREFIX}",
    "p2p-source-producer": f"{PREFIX} minCachedTokenDelta prefillProfileName",
    "precise-prefix-cache-producer": "tokenProcessorConfig indexerConfig kvEventsConfig speculativeIndexing "
    "speculativeTTL",
    "prefix-based-pd-decider": "nonCachedTokens promptTokens",
    "prefix-cache-affinity-filter": "affinityThreshold explorationProbability maxTTFTPenaltyMs ttftSource "
    f"peakPrefillThroughput {PREFIX} {LOAD} latencyPredictionInfoProducerName",
    "prefix-cache-scorer": f"{PREFIX} matchLengthWeight matchLengthScaleTokens",
    "priority-holdback-policy": "shape domain minCeiling maxCeiling",
    "program-aware-fairness": "strategy evictionTtlSeconds evictionSweepSeconds lasWeightService "
    "lasWeightHeadWait lasHalfLifeSeconds",
    "random-picker": "maxNumOfEndpoints",
    "session-affinity-filter": AFFINITY,
    "session-affinity-scorer": AFFINITY,
    "session-id-producer": "headerName cookieName",
    "static-usage-limit-policy": "threshold",
    "token-load-scorer": f"queueThresholdTokens {LOAD}",
    "token-producer": "vllm estimate modelName",
    "topology-affinity-filter": "minAffinity topologyProducerName",
    "topology-affinity-scorer": "topologyProducerName",
    "topology-extractor": "hostname rack zone region",
    "utilization-detector": "queueDepthThreshold kvCacheUtilThreshold metricsStalenessThreshold headroom",
    "utilization-filter": f"conditions fallbackOnEmpty {LOAD}",
    "weighted-random-picker": "maxNumOfEndpoints",
}


def known_names(type_name: str) -> set[str]:
    found: set[str] = set()
    for field in PLUGIN_TYPES[type_name].parameters.model_fields.values():
        alias = field.validation_alias or field.alias
        found |= {str(name) for name in alias.choices} if isinstance(alias, AliasChoices) else {str(alias)}
    return found


@pytest.mark.parametrize("type_name", sorted(REFERENCE))
def test_every_parameter_of_the_reference_is_known(type_name: str) -> None:
    assert set(REFERENCE[type_name].split()) <= known_names(type_name)


def configured(*plugins: dict[str, Any], **more: Any) -> EppConfig:
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": "queue-scorer"}, *plugins],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    }
    return parse_config(yaml.safe_dump(document | more))


@pytest.mark.parametrize("name", ["concurrencyMode", "mode"])
def test_the_detectors_mode_arrives_under_either_name(name: str) -> None:
    detector = {"type": "concurrency-detector", "parameters": {name: "hybrid"}}
    config = configured(detector, saturationDetector={"pluginRef": "concurrency-detector"})
    assert isinstance(config.detector, ConcurrencyDetector)
    assert config.detector.mode == "hybrid"


def test_the_weights_of_program_aware_fairness_arrive() -> None:
    given = {"strategy": "las", "lasWeightService": 0.5, "lasWeightHeadWait": 2.0, "lasHalfLifeSeconds": 0.0}
    policy = {"type": "program-aware-fairness", "parameters": given | {"evictionTtlSeconds": 60.0}}
    flow = {"defaultPriorityBand": {"fairnessPolicyRef": "program-aware-fairness"}}
    config = configured(policy, featureGates=["flowControl"], flowControl=flow)
    assert config.flow is not None
    assert config.flow.default_band == BandSettings(
        fairness=Fairness.PROGRAM_AWARE, half_life_s=0.0, service_weight=0.5, wait_weight=2.0
    )
    assert any("evictionTtlSeconds is ignored" in note for note in config.notes)


@pytest.mark.parametrize(
    ("type_name", "parameters"),
    [
        ("active-request-scorer", {"requestTimeout": "2m"}),
        ("approx-prefix-cache-producer", {"blockSize": 64}),
    ],
)
def test_what_the_reference_does_not_use_either_is_accepted_and_said(
    type_name: str, parameters: dict[str, Any]
) -> None:
    notes = configured({"type": type_name, "parameters": parameters}).notes
    assert any(f"{next(iter(parameters))} is ignored" in note for note in notes)


DISAGG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {{type: disagg-profile-handler, parameters: {parameters}}}
- {{type: always-disagg-pd-decider}}
- {{type: queue-scorer}}
schedulingProfiles:
- {{name: d, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: p, plugins: [{{pluginRef: queue-scorer}}]}}
"""


@pytest.mark.parametrize("decider", ["prefillDeciderPluginName", "deciderPluginName"])
def test_the_older_flat_names_of_the_profile_handler(decider: str) -> None:
    flat = f"{{decodeProfile: d, prefillProfile: p, {decider}: always-disagg-pd-decider}}"
    nested = "{profiles: {decode: d, prefill: p}, deciders: {prefill: always-disagg-pd-decider}}"
    handlers = [parse_config(DISAGG.format(parameters=text)).settings.handler for text in (flat, nested)]
    assert isinstance(handlers[0], DisaggProfileHandler)
    assert handlers[0] == handlers[1]
    assert handlers[0].decider is not None


def test_older_and_newer_names_of_the_profile_handler_do_not_mix() -> None:
    both = "{decodeProfile: d, profiles: {prefill: p}}"
    with pytest.raises(ConfigError, match="decodeProfile is an older spelling"):
        parse_config(DISAGG.format(parameters=both))


def test_a_cache_gauge_of_an_engines_own_is_refused_by_name() -> None:
    engine = {"name": "triton", "cacheBlockSizeSpec": "nv_trt_llm_kv_cache_block_metrics{type=tokens_per}"}
    extractor = {"type": "core-metrics-extractor", "parameters": {"engineConfigs": [engine]}}
    with pytest.raises(ConfigError, match="cacheBlockSizeSpec: cache sizes are read"):
        configured(extractor)


# ---- what later versions of the reference write ----------------------------------------------------

V1 = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: file-discovery, parameters: {{path: /etc/epp/endpoints.yaml}}}}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
dataLayer: {layer}
flowControl:
  defaultRequestTTL: 60s
  priorityBands:
  - {{priority: 1, defaultRequestTTL: 5s}}
  - {{priority: 0}}
  - {{priority: -1, defaultRequestTTL: 0s}}
"""
FOUND = "{discovery: {endpoints: {pluginRef: file-discovery}}}"


@pytest.mark.parametrize(
    "layer",
    [
        FOUND,
        "{discovery: {pluginRef: file-discovery}}",
        "{discovery: {pluginRef: nobody, endpoints: {pluginRef: file-discovery}}}",
    ],
)
def test_v1_says_in_another_place_who_finds_endpoints(layer: str) -> None:
    assert parse_config(V1.format(layer=layer)).discovery_path == "/etc/epp/endpoints.yaml"


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ("{discovery: {}}", "discovery: endpoints.pluginRef is missing"),
        ("{discovery: {peers: {pluginRef: x}}}", "discovery.peers is not part of kvpull: replicas exchange"),
        ("{crossReplica: {syncerPluginRef: x}}", "crossReplica is not part of kvpull: replicas exchange"),
        ("{crossReplicaPublishTimeout: 1s}", "crossReplicaPublishTimeout is not part of kvpull"),
    ],
)
def test_what_replicas_exchange_in_v1_is_refused_with_what_there_is(layer: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(V1.format(layer=layer))


def test_a_band_may_have_a_longest_wait_of_its_own() -> None:
    flow = parse_config(V1.format(layer=FOUND)).flow
    assert flow is not None
    assert [flow.longest_wait_s(priority) for priority in (1, 0, -1, 7)] == [5.0, 60.0, None, 60.0]


def test_priorities_that_engines_would_have_to_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"requestHandler.propagatePriority is not part of kvpull"):
        configured(requestHandler={"propagatePriority": True})
    assert configured(requestHandler={"propagatePriority": False}).settings


def test_a_cost_model_written_down_is_refused_with_where_costs_are_learned() -> None:
    costs = {"prefillMicrosecondsPerToken": 19, "transferMicrosecondsPerToken": 3.9}
    with pytest.raises(ConfigError, match=r"costModel: .* is learned .* PullThresholds"):
        configured({"type": "p2p-source-producer", "parameters": {"costModel": costs}})
