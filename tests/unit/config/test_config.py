"""EndpointPickerConfig: accepted forms, and refusals that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config import load_config, parse_config
from epp.core.disagg import DisaggProfileHandler, SingleProfileHandler
from epp.core.errors import ConfigError
from epp.core.speculation import SpeculationSettings
from epp.plugins.scorers import PrefixCacheScorer, TierWeights
from tests.unit.sidecar.hostile_yaml import HOSTILE

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


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_a_config_error_that_names_the_file(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c\.yaml: "):
        parse_config(text, "c.yaml")


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="key 'kind' twice"):
        parse_config(BASE + "kind: EndpointPickerConfig\n")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match=r"c\.yaml: not UTF-8"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")
    path.write_text(BASE)
    assert load_config(path) == parse_config(BASE)


def with_parameters(type_name: str, parameters: str) -> str:
    """BASE with a plugin of this type and these parameters, which no profile uses."""
    return BASE.replace("plugins:\n", f"plugins:\n- {{type: {type_name}, name: x, {parameters}}}\n", 1)


@pytest.mark.parametrize(
    ("type_name", "field", "bad", "good"),
    [
        ("max-score-picker", "maxNumOfEndpoints", ["0", "-1", "true", "1.5", "null"], ["1", "64"]),
        ("active-request-scorer", "idleThreshold", ["-1", "true"], ["0", "7"]),
        ("active-request-scorer", "maxBusyScore", ["-0.1", "1.1", ".nan", ".inf", "true"], ["0", "0.5", "1"]),
        ("prefix-cache-scorer", "matchLengthWeight", ["-0.1", "1.1", ".nan", "-.inf", "yes"], ["0", "1.0"]),
        ("prefix-cache-scorer", "matchLengthScaleTokens", ["0", "-1", "1" + "0" * 40], ["1"]),
        ("prefix-based-pd-decider", "nonCachedTokens", ["-1", "true", "1" + "0" * 40], ["0", "16"]),
        ("prefix-based-pd-decider", "promptTokens", ["-1", "'1'"], ["0", "16"]),
    ],
)
def test_values_that_would_fail_every_request(
    type_name: str, field: str, bad: list[str], good: list[str]
) -> None:
    for value in bad:
        with pytest.raises(ConfigError, match=rf"plugins\[0\] \(x\)\.parameters: {field}: "):
            parse_config(with_parameters(type_name, f"parameters: {{{field}: {value}}}"))
    for value in good:
        parse_config(with_parameters(type_name, f"parameters: {{{field}: {value}}}"))


@pytest.mark.parametrize("weight", ["-1", ".nan", ".inf", "1e300", "true", "'2'", "null"])
def test_weights_are_finite_and_not_negative(weight: str) -> None:
    profile = BASE.replace("weight: 3}", f"weight: {weight}}}")
    with pytest.raises(ConfigError, match=r"schedulingProfiles\.0\.plugins\.0\.weight: "):
        parse_config(profile)
    backend = BASE.replace("name: cpu, weight: 0.4", f"name: cpu, weight: {weight}")
    assert backend != BASE
    with pytest.raises(ConfigError, match=r"kvCacheBackendConfigs\.1\.weight: "):
        parse_config(backend)
    assert profile != BASE
    parse_config(BASE.replace("weight: 3}", "weight: 0}"))


def test_a_plugin_twice_in_a_profile_is_refused() -> None:
    twice = BASE + "  - {pluginRef: queue-scorer, weight: 2}\n"
    with pytest.raises(
        ConfigError, match=r"schedulingProfiles\[0\] \(default\): queue-scorer is listed twice"
    ):
        parse_config(twice)


def with_speculation(text: str) -> str:
    changed = BASE.replace("    tokenProcessorConfig:", f"    {text}\n    tokenProcessorConfig:")
    assert changed != BASE
    return changed


def test_speculative_indexing_is_off_unless_switched_on() -> None:
    assert parse_config(BASE).speculation is None
    assert parse_config(with_speculation('speculativeTTL: "5s"')).speculation is None
    assert parse_config(with_speculation("speculativeIndexing: true")).speculation == SpeculationSettings(2.0)


@pytest.mark.parametrize(
    ("text", "ttl_s"), [("500ms", 0.5), ("2s", 2.0), ("1m30s", 90.0), ("1.5s", 1.5), ("1h", 3_600.0)]
)
def test_the_speculative_time_to_live_is_a_duration(text: str, ttl_s: float) -> None:
    both = with_speculation(f"speculativeIndexing: true\n    speculativeTTL: {text}")
    assert parse_config(both).speculation == SpeculationSettings(ttl_s)


@pytest.mark.parametrize("value", ["0s", "-1s", "2", "2.0", "''", "2 s", "2s2", "2d", "61m", "null", "true"])
def test_a_time_to_live_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"parameters: speculativeTTL: "):
        parse_config(with_speculation(f"speculativeTTL: {value}"))


@pytest.mark.parametrize("value", ["1", "'true'", "null"])
def test_the_switch_of_speculation_is_a_boolean(value: str) -> None:
    with pytest.raises(ConfigError, match=r"parameters: speculativeIndexing: "):
        parse_config(with_speculation(f"speculativeIndexing: {value}"))


def test_names_of_the_base_model() -> None:
    assert parse_config(BASE).settings.base_models == ()
    producer = "- type: token-producer\n  parameters: {modelName: org/m, servedModelNames: [m, alias]}\n"
    config = parse_config(BASE.replace("plugins:\n", "plugins:\n" + producer, 1))
    assert config.settings.base_models == ("org/m", "m", "alias")
