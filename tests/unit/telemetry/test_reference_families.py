"""Families of the reference that are shown where their part is configured: values, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.approx_prefix import ApproxSettings
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.flow.bands import BandSettings, FlowSettings, Ticket
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import Endpoint, SchedulingRequest
from epp.extproc.conversations import ServiceStats
from epp.flow.controller import FlowController
from epp.telemetry.build_info import expose_build
from epp.telemetry.flow_metrics import FlowCollector
from epp.telemetry.metrics import StreamCollector
from epp.telemetry.pool_gauges import PoolGauges

CONFIG = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
FLOW = "llm_d_epp_flow_control"


def shown(*collectors: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def test_how_full_bands_and_queue_are() -> None:
    settings = FlowSettings(max_requests=8, default_band=BandSettings(max_bytes=1_000, max_requests=4))
    flow = FlowController(settings, lambda _now_s, _unbooked: 1.0)
    for number, size_bytes in enumerate((100, 400)):
        assert flow.queue.offer(Ticket(f"t{number}", 0.0, priority=3, size_bytes=size_bytes)) is None
    value = shown(FlowCollector(flow, "pool")).get_sample_value
    band, pool = {"priority": "3", "inference_pool": "pool"}, {"inference_pool": "pool"}
    assert value(f"{FLOW}_capacity_utilization_requests", band) == 0.5
    assert value(f"{FLOW}_capacity_utilization_bytes", band) == 0.5
    assert value(f"{FLOW}_global_capacity_utilization_requests", pool) == 0.25
    assert value(f"{FLOW}_global_capacity_utilization_bytes", pool) is None  # without a limit no share


def test_how_long_streams_lasted() -> None:
    stats = ServiceStats()
    registry = shown(StreamCollector(lambda: stats))
    name = "llm_d_epp_extproc_stream_duration_seconds"
    assert registry.get_sample_value(f"{name}_count") is None
    for seconds in (0.02, 3.0, 900.0):
        stats.note_end("OK", seconds)
    assert registry.get_sample_value(f"{name}_count") == 3
    assert registry.get_sample_value(f"{name}_sum") == pytest.approx(903.02)
    assert registry.get_sample_value(f"{name}_bucket", {"le": "0.05"}) == 1
    assert registry.get_sample_value(f"{name}_bucket", {"le": "5.0"}) == 2
    assert registry.get_sample_value("llm_d_epp_extproc_streams_total", {"code": "OK"}) == 3


def test_blocks_that_placements_remember() -> None:
    plain = parse_config(CONFIG).settings
    settings = replace(plain, approx=ApproxSettings(block_size_tokens=64))
    picker = EndpointPicker(settings, CacheView(PythonPrefixIndex(bytes(16))))
    picker.upsert_endpoint(Endpoint(EndpointId("a"), "10.0.0.1", 8000))
    picker.schedule(SchedulingRequest("r", token_ids=list(range(200))), 0.0, "d")
    labels = dict.fromkeys(("plugin_name", "plugin_type"), "approx-prefix-cache-producer")
    name = "llm_d_epp_prefix_indexer_size"
    assert shown(PoolGauges(picker, "pool")).get_sample_value(name, labels) == 3
    without = EndpointPicker(replace(plain, approx=None), CacheView(PythonPrefixIndex(bytes(16))))
    assert shown(PoolGauges(without, "pool")).get_sample_value(name, labels) is None


def test_what_runs() -> None:
    registry = CollectorRegistry()
    expose_build(registry, "pure")
    samples = [s for f in registry.collect() for s in f.samples if s.name == "llm_d_epp_info"]
    assert [(s.labels["commit"], bool(s.labels["build_ref"]), s.value) for s in samples] == [("", True, 1.0)]
    assert registry.get_sample_value("kvpull_epp_index_info", {"implementation": "pure"}) == 1
