"""How every part of the fleet is started: argv and environment from values. Nothing runs here."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.local.ports import CONTROL_HOST
from deploy.local.run_files import RunFiles
from deploy.local.spec import ROOT, EngineSpec, FleetSpec
from deploy.local.supervisor import PartSpec

PICKER = "picker"
ENVOY = "envoy"
_PYTHON = {"PYTHONUNBUFFERED": "1"}
_NIXL = {"UCX_NET_DEVICES": "lo"}  # UCX listens on every interface otherwise


def sidecar_name(pod: str) -> str:
    return f"{pod}-sidecar"


def engine_part(spec: FleetSpec, engine: EngineSpec, files: RunFiles) -> PartSpec:
    address = engine.address
    argv = (
        *_module("deploy.local.engine"),
        *("--name", engine.pod),
        *("--host", address.host),
        *("--port", str(address.engine_port)),
        *("--events-port", str(address.events_port)),
        *("--replay-port", str(address.replay_port)),
        *("--p2p-port", str(address.p2p_port)),
        *("--model", spec.model),
        *("--tokenizer", str(spec.tokenizer)),
        *("--timing", spec.timing),
        *("--time-scale", str(spec.time_scale)),
        *("--block-size", str(engine.block_size)),
        *("--kv-bytes-per-token", str(spec.kv_bytes_per_token)),
        *("--device-tokens", str(engine.device_tier_tokens)),
        *("--cpu-tokens", str(engine.cpu_tier_tokens)),
        *("--max-model-len", str(engine.device_tier_tokens)),
        *("--max-num-seqs", str(spec.max_num_seqs)),
        *("--hash-seed", engine.hash_seed),
        *("--peer-key-file", str(files.peer_key_file)),
        "--enable-faults",
        *(() if engine.publishes_events else ("--kv-events", "off")),
        *(("--transfer-keys", "old") if engine.old_transfer_keys else ()),
    )
    return PartSpec(engine.pod, argv, {**_PYTHON, **_NIXL}, ROOT)


def sidecar_part(spec: FleetSpec, engine: EngineSpec, files: RunFiles) -> PartSpec:
    address = engine.address
    argv = (
        *_module("sidecar"),
        *("--listen-host", address.host),
        *("--port", str(address.serving_port)),
        *("--model-server-host", address.host),
        *("--model-server-port", str(address.engine_port)),
        *("--p2p-connector-port", str(address.p2p_port)),
        *("--kv-connector", spec.kv_connector),
        *("--endpoints-file", str(files.endpoints_file)),
        *("--routing-key-file", str(files.routing_key_file)),
        *("--metrics-port", str(address.sidecar_metrics_port)),
        *("--drain-timeout", "1s"),
        "--secure-proxy=false",
    )
    return PartSpec(sidecar_name(engine.pod), argv, _PYTHON, ROOT)


def picker_part(spec: FleetSpec, config: Path, files: RunFiles) -> PartSpec:
    ports = spec.addresses.control
    argv = (
        *_module("epp"),
        *("--config-file", str(config)),
        *("--endpoints-file", str(files.endpoints_file)),
        *("--thresholds-dir", str(files.thresholds_dir)),
        *("--tokenizer", str(spec.tokenizer)),
        *("--tokenizer-budget", "10s"),  # a loaded machine is no reason to route a row blindly
        *("--listen-host", CONTROL_HOST),
        *("--grpc-port", str(ports.extproc_port)),
        *("--grpc-health-port", str(ports.health_port)),
        *("--metrics-port", str(ports.metrics_port)),
        *("--debug-token-file", str(files.debug_token_file)),
        *("--routing-key-file", str(files.routing_key_file)),
        *("--peer-key-file", str(files.peer_key_file)),
        *("--refresh-metrics-interval", "100ms"),
        *("--drain-timeout", "1s"),
    )
    return PartSpec(PICKER, argv, _PYTHON, ROOT, stop_timeout_s=2.0)


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)
