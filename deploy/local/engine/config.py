"""Settings of the emulated engine, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.engine.hashing import ALGORITHMS
from engine_plugin import wire
from engine_plugin.transport.peer_keys import PeerKeys, read_keys
from epp.engine_model.timing import PRESETS, EngineTiming

LOG_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """Settings that contradict each other; the message names them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Ports may be 0: the ready line names the real ones."""

    tokenizer: Path
    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 8200
    p2p_port: int = wire.P2P_PORT
    events_port: int = wire.EVENTS_PORT
    replay_port: int = wire.REPLAY_PORT
    reports_port: int = 0  # any free one: the picker learns it from kvpull_engine_info
    rank: int = 0
    block_size: int = 16  # tokens
    kv_bytes_per_token: int = 2048
    device_tokens: int = 65_536
    cpu_tokens: int = 262_144
    max_num_seqs: int = 64
    max_num_queued: int = 1024
    max_model_len: int = 65_536
    hash_seed: str = "0"
    hash_algo: str = "sha256"
    model: str = "emulated"
    served_model_name: str | None = None  # None: `model`
    timing: EngineTiming = PRESETS["gpt-oss-120b"]
    time_scale: float = 1.0  # real seconds per model second
    peer_keys: PeerKeys = ()
    peer_key_file: Path | None = None  # where they come from; followed, if given
    insecure: bool = False  # without a peer key
    salt_key: bytes | None = None  # None: salts are published in clear
    enable_faults: bool = False
    stock_cpu_events: bool = False
    publishes_events: bool = True
    old_transfer_keys: bool = False
    pull_base_s: float = 2.0
    pull_max_s: float = 10.0
    supply_wait_s: float = 10.0
    supply_keep_s: float = 30.0
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("device_tokens", "cpu_tokens"):
            if getattr(self, name) < self.block_size:
                raise SettingsError(f"--{name.replace('_', '-')} must hold at least one block")
        for name in ("block_size", "max_num_seqs", "max_num_queued", "max_model_len"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least 1")
        if self.max_model_len > self.device_blocks * self.block_size:
            raise SettingsError("--max-model-len must fit --device-tokens")
        if self.kv_bytes_per_token < 8 or self.kv_bytes_per_token % 8:
            raise SettingsError("--kv-bytes-per-token must be a positive multiple of 8")
        if bool(self.peer_keys) == self.insecure:
            raise SettingsError("--peer-key-file is needed, or else --insecure")
        if self.time_scale < 0:
            raise SettingsError("--time-scale must not be negative")

    @property
    def device_blocks(self) -> int:
        return self.device_tokens // self.block_size

    @property
    def cpu_blocks(self) -> int:
        return self.cpu_tokens // self.block_size

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig(tokenizer=Path(), insecure=True)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="DIR")
    for option in ("name", "host", "hash_seed", "model", "served_model_name"):
        add(f"--{option.replace('_', '-')}", default=getattr(default, option))
    for option in (
        "port",
        "p2p_port",
        "events_port",
        "replay_port",
        "reports_port",
        "rank",
        "block_size",
        "kv_bytes_per_token",
        "device_tokens",
        "cpu_tokens",
        "max_num_seqs",
        "max_num_queued",
        "max_model_len",
    ):
        add(f"--{option.replace('_', '-')}", type=int, default=getattr(default, option))
    for option in ("time_scale", "pull_base_s", "pull_max_s", "supply_wait_s", "supply_keep_s", "drain_s"):
        add(f"--{option.replace('_', '-')}", type=float, default=getattr(default, option))
    add("--hash-algo", choices=sorted(ALGORITHMS), default=default.hash_algo)
    add("--timing", choices=sorted(PRESETS), default="gpt-oss-120b")
    add("--peer-key-file", type=Path, default=None)
    add("--insecure", action="store_true", help="no peer key: any peer is trusted, control is plain text")
    add("--salt-key-file", type=Path, default=None)
    add("--enable-faults", action="store_true")
    add("--cpu-events", choices=("plugin", "stock"), default="plugin")
    add("--kv-events", choices=("on", "off"), default="on")
    add("--transfer-keys", choices=("new", "old"), default="new", help="old: prefill, decode, p2p")
    add("--ready-fd", type=int, default=None)
    add("--log-level", choices=LOG_LEVELS, default="info")


def _peer_keys(file: Path | None) -> PeerKeys:
    try:
        return read_keys(file) if file else ()
    except ValueError as error:
        raise SettingsError(f"--peer-key-file {file}: {error}") from error


def parse_arguments(argv: Sequence[str]) -> tuple[EngineConfig, argparse.Namespace]:
    """The configuration, and the process's options (`ready_fd`, `log_level`).

    Ends the process with a sentence on bad input.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.local.engine", description="Emulated engine")
    _add_arguments(parser)
    options = parser.parse_args(argv)
    values = vars(options).copy()
    process = argparse.Namespace(ready_fd=values.pop("ready_fd"), log_level=values.pop("log_level"))
    peer_keys, salt_key = values["peer_key_file"], values.pop("salt_key_file")
    try:
        values["peer_keys"] = _peer_keys(peer_keys)
        values["salt_key"] = salt_key.read_bytes().rstrip(b"\r\n") if salt_key else None
        values["timing"] = PRESETS[values["timing"]]
        values["publishes_events"] = values.pop("kv_events") == "on"
        values["old_transfer_keys"] = values.pop("transfer_keys") == "old"
        values["stock_cpu_events"] = values.pop("cpu_events") == "stock"
        return EngineConfig(**values), process
    except (SettingsError, OSError) as error:
        parser.error(str(error))
