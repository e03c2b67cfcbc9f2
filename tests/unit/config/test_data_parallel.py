"""`data-parallel-profile-handler`: one port of a pod for the gateway, the rank in a header."""

from __future__ import annotations

import pytest

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import Endpoint, EndpointMetrics, SchedulingRequest
from epp.routing_headers import absent_headers, destination_of, routing_headers

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
CONFIG = (
    HEAD
    + """
plugins:
- {type: data-parallel-profile-handler, parameters: {primaryPort: 8100}}
- {type: queue-scorer}
- {type: max-score-picker, parameters: {maxNumOfEndpoints: 4}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]
"""
)


def picker(text: str) -> EndpointPicker:
    made = EndpointPicker(parse_config(text).settings, CacheView(PythonPrefixIndex(bytes(16))))
    for number, waiting in ((0, 3.0), (1, 0.0), (2, 1.0)):
        pod = EndpointId("pod", number)
        host = "10.0.0.1" if number < 2 else "10.0.0.2"
        made.upsert_endpoint(Endpoint(pod, host, 8000 + number))
        made.update_metrics(pod, EndpointMetrics(0.0, waiting))
    return made


def test_the_gateway_gets_the_primary_port_and_the_sidecar_the_rank() -> None:
    decision = picker(CONFIG).schedule(SchedulingRequest("r"), 0.0, "d")
    assert (decision.destination.host, decision.destination.port) == ("10.0.0.1", 8001)
    assert destination_of(decision) == "10.0.0.1:8100,10.0.0.2:8100"  # two ranks of one pod are one address
    headers = routing_headers(decision, None, 0.0)
    assert headers["x-data-parallel-host-port"] == "10.0.0.1:8001"
    assert "x-data-parallel-host-port" not in absent_headers(headers)


def test_without_the_handler_the_header_is_taken_away() -> None:
    plain = CONFIG.replace("- {type: data-parallel-profile-handler, parameters: {primaryPort: 8100}}\n", "")
    decision = picker(plain).schedule(SchedulingRequest("r"), 0.0, "d")
    assert destination_of(decision) == "10.0.0.1:8001,10.0.0.2:8002,10.0.0.1:8000"
    headers = routing_headers(decision, None, 0.0)
    assert "x-data-parallel-host-port" in absent_headers(headers)


def test_it_takes_one_profile_and_says_that_it_is_deprecated() -> None:
    assert any("deprecated" in note for note in parse_config(CONFIG).notes)
    two = CONFIG + "- name: other\n  plugins: [{pluginRef: queue-scorer}]\n"
    with pytest.raises(ConfigError, match="data-parallel-profile-handler takes one profile"):
        parse_config(two)
