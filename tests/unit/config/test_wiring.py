"""Who reads whose data: named, the only one, or added; never another one in silence."""

from __future__ import annotations

import pytest

from epp.config import EppConfig, parse_config
from epp.core.disagg import DisaggProfileHandler, SingleProfileHandler
from epp.core.errors import ConfigError
from epp.plugins.plugin_type import PLACED, PRECISE
from epp.plugins.prefix_scorer import PrefixCacheScorer

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
PRECISE_ROW = "- {type: precise-prefix-cache-producer}"
APPROX_ROW = "- {type: approx-prefix-cache-producer}"
SCORER = "- {type: prefix-cache-scorer}"
NAMED = "- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: %s}}"


def document(*plugins: str, profile: str = "prefix-cache-scorer", rest: str = "") -> str:
    refs = ", ".join(f"{{pluginRef: {name}}}" for name in profile.split())
    profiles = f"schedulingProfiles:\n- {{name: default, plugins: [{refs}]}}\n"
    return HEAD + "plugins:\n" + "\n".join(plugins) + "\n" + rest + profiles


def scorer(config: EppConfig) -> PrefixCacheScorer:
    handler = config.settings.handler
    assert isinstance(handler, SingleProfileHandler)
    found = handler.profile.scorers[0][0]
    assert isinstance(found, PrefixCacheScorer)
    return found


def added(config: EppConfig) -> dict[str, str]:
    assert config.explanation is not None
    return {p.name: p.added for p in config.explanation.plugins if p.added}


def wiring(config: EppConfig) -> set[tuple[str, str, str, str]]:
    assert config.explanation is not None
    return set(config.explanation.wiring)


def test_without_a_producer_the_reference_default_is_added_and_shown() -> None:
    config = parse_config(document(SCORER))
    assert scorer(config).prefix is PLACED
    assert config.settings.approx is not None
    assert config.settings.approx.block_size_tokens == 64
    assert added(config) == {
        "max-score-picker": "profile default names no picker",
        "single-profile-handler": "no profile handler is configured",
        "approx-prefix-cache-producer": "prefix-cache-scorer needs prefix match",
        "token-producer": "approx-prefix-cache-producer needs tokens",
    }
    assert ("prefix-cache-scorer", "prefix match", "approx-prefix-cache-producer", "default") in wiring(
        config
    )
    assert config.tokens is None  # nobody wrote one: the picker's own flags still may


def test_the_only_producer_is_taken_and_that_is_said() -> None:
    config = parse_config(document(PRECISE_ROW, SCORER))
    assert scorer(config).prefix is PRECISE
    assert config.settings.approx is None
    edge = ("prefix-cache-scorer", "prefix match", "precise-prefix-cache-producer", "only one")
    assert edge in wiring(config)
    assert any(
        "names no producer" in note and "the reference would add approx" in note for note in config.notes
    )


@pytest.mark.parametrize(
    ("name", "prefix"), [("precise-prefix-cache-producer", PRECISE), ("approx-prefix-cache-producer", PLACED)]
)
def test_with_two_producers_the_named_one_is_read(name: str, prefix: object) -> None:
    config = parse_config(document(PRECISE_ROW, APPROX_ROW, NAMED % name))
    assert scorer(config).prefix is prefix
    assert ("prefix-cache-scorer", "prefix match", name, "named") in wiring(config)


def test_two_producers_and_no_name_is_an_error() -> None:
    """router#2274: the consumer was silently fed by the other one."""
    with pytest.raises(
        ConfigError, match=r"does not say whose prefix match .*set prefixMatchInfoProducerName"
    ):
        parse_config(document(PRECISE_ROW, APPROX_ROW, SCORER))


def test_naming_the_default_adds_it_next_to_the_precise_one() -> None:
    config = parse_config(document(PRECISE_ROW, NAMED % "approx-prefix-cache-producer"))
    assert scorer(config).prefix is PLACED
    assert "approx-prefix-cache-producer" in added(config)


@pytest.mark.parametrize("name", ["precise-prefix-cache-producer", "max-score-picker", "typo"])
def test_a_name_that_produces_nothing_of_the_kind_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"prefixMatchInfoProducerName: no producer named '{name}'"):
        parse_config(document(APPROX_ROW, "- {type: max-score-picker}", NAMED % name))


def test_pulls_need_what_engines_report() -> None:
    p2p = "- {type: p2p-source-producer}"
    with pytest.raises(ConfigError, match="needs prefix matches that engines report"):
        parse_config(document(APPROX_ROW, SCORER, p2p))
    named = (NAMED % "approx-prefix-cache-producer").replace("prefix-cache-scorer", "p2p-source-producer")
    with pytest.raises(ConfigError, match="knows where prompts were sent and not what engines hold"):
        parse_config(document(PRECISE_ROW, APPROX_ROW, NAMED % "approx-prefix-cache-producer", named))


def test_metrics_are_added_with_their_source_unless_switched_off() -> None:
    text = document("- {type: queue-scorer}", profile="queue-scorer")
    assert {"core-metrics-extractor", "metrics-data-source"} <= set(added(parse_config(text)))
    off = document(
        "- {type: queue-scorer}", profile="queue-scorer", rest="dataLayer: {injectDefaults: false}\n"
    )
    with pytest.raises(
        ConfigError, match=r"queue-scorer needs engine metrics, dataLayer\.injectDefaults is false"
    ):
        parse_config(off)


def test_nothing_at_all_is_the_default_profile() -> None:
    config = parse_config(HEAD)
    assert config.explanation is not None
    profile = config.explanation.profiles[0]
    assert dict(profile.scorers) == {
        "queue-scorer": 2.0,
        "kv-cache-utilization-scorer": 2.0,
        "prefix-cache-scorer": 3.0,
    }
    assert any("a profile `default`" in note for note in config.notes)


def test_plugins_without_a_profile_get_one_that_holds_them_all() -> None:
    """As the reference has it: filters, scorers and pickers, each with weight 1."""
    config = parse_config(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        "- {type: decode-filter}\n- {type: queue-scorer, name: q}\n- {type: load-aware-scorer}\n"
        "- {type: random-picker}\n- {type: agent-identity}\n"
    )
    (profile,) = config.settings.handler.profiles
    assert [plugin.name for plugin in profile.filters] == ["decode-filter"]
    assert [(scorer.name, weight) for scorer, weight in profile.scorers] == [
        ("q", 1.0),
        ("load-aware-scorer", 1.0),
    ]
    assert profile.picker.name == "random-picker"
    note = next(note for note in config.notes if note.startswith("no profiles"))
    assert "decode-filter, q, load-aware-scorer, random-picker" in note
    alone = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: agent-identity}]"
    (profile,) = parse_config(alone).settings.handler.profiles
    assert (profile.filters, profile.scorers) == ((), ())


def test_what_has_no_effect_is_said() -> None:
    config = parse_config(
        document(
            PRECISE_ROW.replace("}", ", parameters: {kvEventsConfig: {zmqEndpoint: 'tcp://*:5557'}}}"),
            SCORER,
            "- {type: random-picker}",
            "- {type: queue-scorer}",
        )
    )
    assert any("kvEventsConfig.zmqEndpoint is ignored: every engine is dialled" in n for n in config.notes)
    assert "queue-scorer has no effect: no profile uses it" in config.notes
    assert "random-picker has no effect: no profile uses it" in config.notes


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("featureGates: [fast]\n", r"featureGates\[0\]: 'fast': known are flowControl"),
        ("featureGates: [flowControl=yes]\n", "alone or with =true"),
        ("dataLayer: {peerDiscovery: {pluginRef: x}}\n", "peerDiscovery is not part of kvpull"),
        ("dataLayer: {sources: [{pluginRef: nobody}]}\n", r"sources\[0\]: no plugin named 'nobody'"),
        (
            "dataLayer: {sources: [{pluginRef: prefix-cache-scorer}]}\n",
            r"sources\[0\]: prefix-cache-scorer is a scorer",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: prefix-cache-scorer}]}\n",
            "parsers: prefix-cache-scorer is a",
        ),
        ("flowControl: {enableEviction: true}\n", "enableEviction is not part of kvpull"),
        ("flowControl: {maxBytes: lots}\n", "maxBytes: expected a quantity"),
        ("flowControl: {defaultRequestTTL: 5}\n", "defaultRequestTTL: expected a duration"),
        (
            "flowControl: {priorityBands: [{priority: 1}, {priority: 1}]}\n",
            r"priorityBands\[1\]: every band needs a priority of its own",
        ),
        (
            "flowControl: {saturationDetector: {pluginRef: prefix-cache-scorer}}\n",
            "saturationDetector: prefix-cache-scorer is a scorer, not a saturation detector",
        ),
        (
            "featureGates: [flowControl]\nflowControl: {usageLimitPolicyPluginRef: gone}\n",
            "no plugin named 'gone'",
        ),
    ],
)
def test_sections_are_strict(rest: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(document(PRECISE_ROW, SCORER, rest=rest))


def test_a_session_attribute_needs_its_plugin() -> None:
    parameters = "{strategy: session_id, sessionIdConfig: {sources: [{attribute: session-id}]}}"
    row = f"- {{type: session-affinity-scorer, parameters: {parameters}}}"
    with pytest.raises(ConfigError, match="no plugin provides the attribute 'session-id'; provided: none"):
        parse_config(document(row, profile="session-affinity-scorer"))
    cookie = "- {type: session-id-producer, parameters: {cookieName: sid}}"
    config = parse_config(document(row, cookie, profile="session-affinity-scorer"))
    assert config.settings.header_names == {"cookie"}
    assert len(config.settings.followers) == 1


DISAGG = """
- {type: always-disagg-pd-decider}
- {type: prefill-filter}
- {type: disagg-profile-handler, parameters: %s}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: []}
"""


def disagg(parameters: str) -> str:
    return HEAD + "plugins:" + DISAGG % parameters


def test_prefill_first_always_has_a_prefill_stage() -> None:
    handler = parse_config(disagg("{stageOrder: prefill-first}")).settings.handler
    assert isinstance(handler, DisaggProfileHandler)
    assert handler.prefill_first
    assert handler.prefill is not None
    assert not handler.may_decode_alone


def test_decode_first_without_a_decider_never_splits_and_says_so() -> None:
    config = parse_config(disagg("{}"))
    assert len(config.settings.handler.profiles) == 1
    assert "prompts are never split: disagg-profile-handler has no deciders.prefill" in config.notes
    assert "profile prefill has no effect: no stage runs it" in config.notes


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            "{stageOrder: prefill-first, deciders: {prefill: always-disagg-pd-decider}}",
            "prefill-first always has a prefill stage",
        ),
        ("{deciders: {encode: x}}", "encode disaggregation is not part of kvpull"),
        ("{deciders: {prefill: prefill-filter}}", "prefill-filter is a filter"),
        ("{deciders: {prefill: nobody}}", "no plugin named 'nobody'"),
        ("{stageOrder: sideways}", "stageOrder"),
        ("{profiles: {decode: gone}}", "no profile named 'gone'"),
        ("{profiles: {prefill: other}}", "no stage runs the profile 'prefill'"),
    ],
)
def test_handlers_refuse_what_they_cannot_run(parameters: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(disagg(parameters))
