"""Turns of one agent's session share a flow, where agent-identity is configured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.config import parse_config
from epp.core.errors import ConfigError
from epp.extproc import wire
from tests.unit.director.rig import BASE, Rig

ASKED = {"model": BASE, "prompt": "x"}
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{{type: queue-scorer}}, {{type: agent-identity{parameters}}}]
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
"""
PLAIN = CONFIG.format(parameters="")
MORE = CONFIG.format(parameters=", parameters: {additionalSessionHeaders: [X-My-Agent, x-other]}")
KNOWN = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
FAIRNESS = wire.FAIRNESS_ID[0]


async def flow_of(config: str | None, *headers: tuple[str, str]) -> str:
    """The fairness id that a request with these headers is counted under."""
    rig = Rig()
    names = parse_config(config).settings.identity_headers if config else ()
    rig.pool.picker.apply(replace(rig.pool.picker._settings, identity_headers=names))
    await rig.route(ASKED, headers=headers)
    (flow,) = {
        sample.labels["fairness_id"]
        for family in rig.registry.collect()
        for sample in family.samples
        if sample.name == "llm_d_epp_request_running" and sample.value
    }
    return flow


@pytest.mark.parametrize("name", KNOWN)
async def test_a_session_header_names_the_flow(name: str) -> None:
    assert await flow_of(PLAIN, (name, "s1")) == "s1"


async def test_the_first_header_of_the_list_wins_and_ones_own_come_before_the_known_ones() -> None:
    every = [(name, f"of {name}") for name in reversed((*KNOWN, "x-other", "x-my-agent"))]
    assert await flow_of(PLAIN, *every) == "of x-claude-code-session-id"
    assert await flow_of(MORE, *every) == "of x-my-agent"
    assert await flow_of(MORE, ("x-my-agent", ""), ("x-other", "o")) == "o"


async def test_what_the_client_says_of_fairness_wins_over_the_session() -> None:
    assert await flow_of(PLAIN, ("session-id", "s1"), (FAIRNESS, "team")) == "team"


@pytest.mark.parametrize("value", ["", "x" * 513, "a\x00b"])
async def test_without_a_usable_session_it_is_the_default_flow(value: str) -> None:
    assert await flow_of(PLAIN, ("session-id", value)) == wire.DEFAULT_FAIRNESS_ID


async def test_without_the_plugin_sessions_are_not_looked_at() -> None:
    assert await flow_of(None, ("session-id", "s1")) == wire.DEFAULT_FAIRNESS_ID


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="additionalSessionHeaders"):
        parse_config(CONFIG.format(parameters=", parameters: {additionalSessionHeaders: ['a b']}"))
