"""EndpointPickerConfig: accepted forms, and refusals that name the place."""

from __future__ import annotations

import pytest

from epp.config import parse_config
from epp.core.disagg import DisaggProfileHandler, SingleProfileHandler
from epp.core.errors import ConfigError
from epp.plugins.scorers import PrefixCacheScorer, TierWeights

BASE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSize: 64}
    indexerConfig:
      kvCacheBackendConfigs: [{name: gpu, weight: 1.0}, {name: cpu, weight: 0.4}]
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: queue-scorer
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 2}
- type: p2p-source-producer
  parameters: {minCachedTokenDelta: 2048}
- type: file-discovery
  parameters: {path: endpoints.yaml}
dataLayer:
  discovery: {pluginRef: file-discovery}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer}
  - {pluginRef: max-score-picker}
"""

DISAGG = BASE.replace(
    "- type: queue-scorer\n",
    """- type: queue-scorer
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: disagg-profile-handler
  parameters: {deciders: {prefill: always-disagg-pd-decider}}
""",
    1,
).replace(
    "- name: default\n",
    """- name: prefill
  plugins: [{pluginRef: prefill-filter}]
- name: decode
""",
)


def test_the_first_set_of_plugins_is_wired() -> None:
    config = parse_config(BASE)
    handler = config.settings.handler
    assert isinstance(handler, SingleProfileHandler)
    profile = handler.profile
    assert [(s.name, w) for s, w in profile.scorers] == [("prefix-cache-scorer", 3.0), ("queue-scorer", 1.0)]
    scorer = profile.scorers[0][0]
    assert isinstance(scorer, PrefixCacheScorer)
    assert scorer.weights == TierWeights(1.0, 0.4)
    assert config.settings.source_producer is not None
    assert config.settings.source_producer.min_cached_token_delta == 2048
    assert config.discovery_path == "endpoints.yaml"


@pytest.mark.parametrize("group", ["llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1"])
def test_older_and_newer_groups_are_accepted(group: str) -> None:
    assert parse_config(BASE.replace("llm-d.ai/v1alpha1", group)).precise is not None


def test_disagg_handler() -> None:
    handler = parse_config(DISAGG).settings.handler
    assert isinstance(handler, DisaggProfileHandler)
    assert (handler.decode.name, handler.prefill.name) == ("decode", "prefill")


def test_off_by_default_is_said() -> None:
    without = BASE.replace("- type: p2p-source-producer\n  parameters: {minCachedTokenDelta: 2048}\n", "")
    config = parse_config(without)
    assert config.settings.source_producer is None
    assert any("p2p-source-producer is not configured" in note for note in config.notes)
    unset = parse_config(BASE.replace("  parameters: {minCachedTokenDelta: 2048}\n", ""))
    assert any("no source is named" in note for note in unset.notes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("llm-d.ai/v1alpha1", "v7", "apiVersion 'v7': allowed are"),
        ("kind: EndpointPickerConfig", "kind: Pod", "kind 'Pod'"),
        ("type: queue-scorer", "type: queue-scorr", r"plugins\[2\]: unknown type 'queue-scorr'; known are"),
        (
            "maxNumOfEndpoints: 2",
            "maxNumEndpoints: 2",
            r"parameters: maxNumEndpoints: .*allowed: maxNumOfEndpoints",
        ),
        (
            "minCachedTokenDelta: 2048",
            "minCachedTokenDelta: 0",
            "minCachedTokenDelta: .*greater than or equal to 1",
        ),
        ("minCachedTokenDelta: 2048", "minCachedTokenDelta: many", "minCachedTokenDelta"),
        ("- {pluginRef: queue-scorer}", "- {pluginRef: nobody}", "no plugin named 'nobody'"),
        ("- {pluginRef: queue-scorer}", "- {pluginRef: file-discovery}", "file-discovery is a discovery"),
        (
            "prefixMatchInfoProducerName: precise-prefix-cache-producer",
            "prefixMatchInfoProducerName: approx",
            "no producer named 'approx'",
        ),
        ("schedulingProfiles:", "scheduling:", "scheduling: Extra inputs"),
        ("pluginRef: file-discovery}", "pluginRef: queue-scorer}", "queue-scorer is a scorer"),
    ],
)
def test_refusals_name_the_place(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(BASE.replace(old, new))


def test_a_consumer_without_its_producer_is_refused() -> None:
    cut = BASE[: BASE.index("- type: precise")] + BASE[BASE.index("- type: prefix-cache-scorer") :]
    with pytest.raises(ConfigError, match="needs prefix matches"):
        parse_config(
            cut.replace("  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}\n", "")
        )


@pytest.mark.parametrize("text", ["", "[]", "a: [", "just text"])
def test_not_a_document(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)
