"""`core-metrics-extractor.engineConfigs`: where an engine's figures are on its page."""

from __future__ import annotations

import pytest

from epp.cli import parser
from epp.config import parse_config
from epp.core.errors import ConfigError
from epp.plugins.metric_specs import EngineGauges, GaugeSpec
from epp.settings import metrics_page

HEAD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- type: core-metrics-extractor
  parameters:
    defaultEngine: triton
    engineConfigs:
    - {name: vllm, queuedRequestsSpec: "vllm:num_requests_waiting", loraSpec: "vllm:lora_requests_info"}
    - {name: triton, %s}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer}]}
"""


def test_specs_reach_the_scraper() -> None:
    config = parse_config(HEAD % 'queuedRequestsSpec: "nv{request_type=waiting}", kvCacheUsageSpec: usage')
    arguments = parser().parse_args(["epp", "--config-file", "x"])
    assert metrics_page(arguments, config.metrics_source, config.engine_gauges).gauges == EngineGauges(
        waiting=(GaugeSpec("vllm:num_requests_waiting"), GaugeSpec("nv", (("request_type", "waiting"),))),
        kv_usage=(GaugeSpec("usage"),),
    )
    assert any(
        "default_engine is ignored" in note or "defaultEngine is ignored" in note for note in config.notes
    )


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('queuedRequestsSpec: "a{b}"', "expected a metric"),
        ("loraSpec: my_loras", "loraSpec: vllm:lora_requests_info"),
        ("customMetrics: [{name: x}]", "customMetrics: nothing reads them"),
        ("waitingSpec: x", "waitingSpec"),
    ],
)
def test_what_cannot_be_done_is_refused(entry: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config(HEAD % entry)
