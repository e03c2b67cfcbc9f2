"""The generated command lines and files are understood by the very parsers of the parts."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local import commands
from deploy.local.engine.config import parse_arguments
from deploy.local.ports import AddressPlan
from deploy.local.run_files import DirectoryInUse, RunFiles
from deploy.local.spec import FleetSpec
from epp.cli import parser as picker_parser
from epp.core.thresholds import EVERYWHERE
from epp.thresholds.document import parse_document
from sidecar.config import parse_config
from sidecar.endpoint_file import load_endpoint_file

_INTERPRETER = 3  # python -m module


@pytest.fixture
def spec(tmp_path: Path) -> FleetSpec:
    return FleetSpec(AddressPlan("127.0.31", 1000), out_dir=tmp_path / "out")


@pytest.fixture
def files(spec: FleetSpec) -> Iterator[RunFiles]:
    made = RunFiles(spec.run_dir)
    yield made
    made.remove()


def test_engine_understands_its_arguments(spec: FleetSpec, files: RunFiles) -> None:
    part = commands.engine_part(spec, spec.engine("engine-b"), files)
    config, _ = parse_arguments(part.argv[_INTERPRETER:])
    assert (config.name, config.host, config.port) == ("engine-b", "127.0.31.2", 9200)
    assert (config.events_port, config.replay_port, config.p2p_port) == (6557, 6657, 8777)
    assert config.block_bytes == spec.block_size * spec.kv_bytes_per_token
    assert config.peer_keys == (files.peer_key_file.read_bytes(),)
    assert part.env["UCX_NET_DEVICES"] == "lo"


def test_a_pod_may_be_unlike_the_others(spec: FleetSpec, files: RunFiles) -> None:
    ill = {
        "hash_seed": "x",
        "block_size": 32,
        "publishes_events": False,
        "old_transfer_keys": True,
        "listed_p2p_port": 9,
    }
    spec = replace(spec, variants={"engine-b": ill})
    for pod, expected in (
        ("engine-a", ("kvpull-demo", 16, True, False)),
        ("engine-b", ("x", 32, False, True)),
    ):
        config, _ = parse_arguments(commands.engine_part(spec, spec.engine(pod), files).argv[_INTERPRETER:])
        seen = (config.hash_seed, config.block_size, config.publishes_events, config.old_transfer_keys)
        assert seen == expected
    files.write_endpoints(spec.engines(), {})
    ports = [row.p2p_port for row in load_endpoint_file(files.endpoints_file)]
    assert ports == [8777, 9, 8777]


def test_sidecar_understands_its_arguments(spec: FleetSpec, files: RunFiles) -> None:
    files.write_endpoints(spec.engines(), {})
    part = commands.sidecar_part(spec, spec.engine("engine-c"), files)
    config = parse_config(part.argv[_INTERPRETER:], {})
    assert (config.listen_host, config.port) == ("127.0.31.3", 9000)
    assert (config.model_server_host, config.model_server_port) == ("127.0.31.3", 9200)
    assert config.pull_enabled
    assert config.routing_key is not None


def test_picker_understands_its_arguments(spec: FleetSpec, files: RunFiles) -> None:
    part = commands.picker_part(spec, spec.picker_config, files)
    arguments = picker_parser().parse_args(["epp", *part.argv[_INTERPRETER:]])
    assert (arguments.grpc_port, arguments.metrics_port) == (10_002, 10_090)
    assert arguments.refresh_metrics_interval == 0.1


def test_endpoint_file_names_every_port_and_role(spec: FleetSpec, files: RunFiles) -> None:
    files.write_endpoints(spec.engines(), {"engine-a": "prefill"})
    rows = load_endpoint_file(files.endpoints_file)
    assert [row.pod for row in rows] == list(spec.pods)
    assert [row.labels["llm-d.ai/role"] for row in rows] == ["prefill", "both", "both"]
    second = rows[1]
    assert (second.host, second.serving_port, second.metrics_port) == ("127.0.31.2", 9000, 9200)
    assert (second.events_port, second.replay_port, second.p2p_port) == (6557, 6657, 8777)


def test_thresholds_document_is_understood(files: RunFiles) -> None:
    files.write_thresholds(enabled=False, min_cached_token_delta=4096)
    (path,) = files.thresholds_dir.glob("*.yaml")
    thresholds = parse_document(path.read_text(), str(path)).rules[EVERYWHERE]
    assert (thresholds.enabled, thresholds.min_cached_token_delta) == (False, 4096)


def test_secrets_are_private_new_and_gone(spec: FleetSpec) -> None:
    first = RunFiles(spec.run_dir)
    token = first.debug_token
    for path in (first.debug_token_file, first.peer_key_file, first.routing_key_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.remove()
    assert not spec.run_dir.exists()
    second = RunFiles(spec.run_dir)
    assert second.debug_token != token
    second.remove()


def test_second_fleet_in_the_same_directory_is_refused(spec: FleetSpec, files: RunFiles) -> None:
    with pytest.raises(DirectoryInUse, match=r"--out"):
        RunFiles(spec.run_dir)
    assert files.debug_token_file.exists()
