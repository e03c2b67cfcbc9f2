"""The fleet of real vLLM engines as values: ports, sizes, and what a page of counters says of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from deploy.local.ports import AddressPlan
from deploy.local.run_files import RunFiles
from deploy.local.spec import FleetSpec
from deploy.local.vllm.accounts import Page
from deploy.local.vllm.parts import PODS, SHAPE, _arguments, vllm_spec
from deploy.local.vllm.run import wanted_rows
from deploy.local.vllm.scene import DOCUMENT_TOKENS
from engine_plugin.vllm.tier_config import TierConfig

PAGE = """\
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 4110.0
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{engine="0",source="p2p"} 4096.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 32.0
# TYPE kvpull_pulls counter
kvpull_pulls_total{engine="0",reason="ok"} 2.0
# TYPE kvpull_pull_served_bytes counter
kvpull_pull_served_bytes_total{engine="0",peer="one"} 5.0
kvpull_pull_served_bytes_total{engine="0",peer="two"} 7.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> FleetSpec:
    return vllm_spec(AddressPlan("127.0.31", 1300), tmp_path / "out")


@pytest.fixture
def files(spec: FleetSpec) -> Iterator[RunFiles]:
    files = RunFiles(spec.run_dir)
    yield files
    files.remove()


def test_engines_that_bind_every_interface_have_ports_of_their_own(spec: FleetSpec) -> None:
    ports = [
        port for engine in spec.engines() for port in (engine.address.events_port, engine.address.replay_port)
    ]
    assert len(set(ports)) == 2 * len(PODS)


def test_an_engine_is_told_what_the_endpoint_file_says_of_it(spec: FleetSpec, files: RunFiles) -> None:
    engine = spec.engine("engine-b")
    arguments = _arguments(spec, engine, files)
    options = dict(pairwise(arguments))
    events = json.loads(options["--kv-events-config"])
    assert events["endpoint"].endswith(f":{engine.address.events_port}")
    extra = json.loads(options["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == spec.cpu_tier_tokens * SHAPE.kv_bytes_per_token
    (tier,) = extra["secondary_tiers"]
    config = TierConfig.parse({name: value for name, value in tier.items() if name != "type"})
    assert (config.host, config.port) == (engine.address.host, engine.address.p2p_port)
    assert (config.events_port, config.model) == (engine.address.events_port, spec.model)
    assert config.peer_key_file == str(files.peer_key_file)


def test_two_documents_push_a_third_out_of_the_device_cache_but_not_out_of_the_tier(spec: FleetSpec) -> None:
    assert 2 * DOCUMENT_TOKENS < spec.device_tier_tokens < 3 * DOCUMENT_TOKENS
    assert spec.cpu_tier_tokens > 8 * DOCUMENT_TOKENS


def test_real_engines_need_more_memory_and_the_plan_says_so(spec: FleetSpec) -> None:
    plan = spec.memory()
    assert plan.total_bytes > len(PODS) * (1 << 30)
    assert plan.shm_bytes == len(PODS) * spec.cpu_tier_tokens * spec.kv_bytes_per_token


def test_a_page_is_summed_over_labels_that_do_not_matter() -> None:
    page = Page.read(PAGE)
    assert page.cached == {"p2p": 4096, "host": 32}
    assert page.pulls == {"ok": 2}
    assert page.totals["vllm:prompt_tokens_total"] == 4110
    assert page.totals["kvpull_pull_served_bytes_total"] == 12


def test_a_third_engine_is_needed_for_two_holders_and_a_destination_only() -> None:
    assert wanted_rows(3) == tuple(range(1, 13))
    assert wanted_rows(2) == tuple(number for number in range(1, 13) if number != 9)
