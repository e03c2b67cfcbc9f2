"""What one local fleet consists of: values only, and the memory that they imply.

Sizes are chosen for the scenario: a 48K-token document fits the device tier beside a little load, two
of them do not; the CPU tier holds everything that the scenario ever asks an engine to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.local.ports import AddressPlan, EngineAddress
from deploy.local.preflight import MemoryPlan

ROOT = Path(__file__).resolve().parents[2]
MODEL = "kvpull-demo"
ROLE_BOTH = "both"
_PROCESS_BYTES = 120 << 20  # a Python process with its libraries, measured
_ENVOY_BYTES = 80 << 20


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One pod: an emulated engine and its sidecar."""

    address: EngineAddress
    hash_seed: str
    block_size: int
    device_tier_tokens: int
    cpu_tier_tokens: int
    publishes_events: bool = True
    old_transfer_keys: bool = False  # reads kv_transfer_params under the names of older engines
    listed_p2p_port: int | None = None  # what the endpoint file says; None: the real one

    @property
    def pod(self) -> str:
        return self.address.pod


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Everything that distinguishes one fleet from another."""

    addresses: AddressPlan = field(default_factory=AddressPlan)
    out_dir: Path = ROOT / "out"
    pods: tuple[str, ...] = ("engine-a", "engine-b", "engine-c")
    picker_config: Path = ROOT / "config" / "epp" / "demo.yaml"
    tokenizer: Path = ROOT / "config" / "tokenizer"
    model: str = MODEL
    timing: str = "gpt-oss-120b"
    time_scale: float = 1.0
    block_size: int = 16  # tokens
    kv_bytes_per_token: int = 2048
    device_tier_tokens: int = 64 * 1024
    cpu_tier_tokens: int = 160 * 1024
    kv_connector: str = "offloading"  # of the sidecars; decides the form of P/D legs
    request_timeout_s: float = 60.0  # of what a client asks
    max_num_seqs: int = 4  # small, so that a handful of requests makes an engine busy
    hash_seed: str = "kvpull-demo"
    # pod -> what is unlike in `EngineSpec`
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Generated configuration and secrets; removed when the fleet stops."""
        return self.out_dir / "run"

    @property
    def log_dir(self) -> Path:
        return self.out_dir / "logs"

    def engine(self, pod: str) -> EngineSpec:
        usual = EngineSpec(
            address=self.addresses.engine(self.pods.index(pod) + 1, pod),
            hash_seed=self.hash_seed,
            block_size=self.block_size,
            device_tier_tokens=self.device_tier_tokens,
            cpu_tier_tokens=self.cpu_tier_tokens,
        )
        return replace(usual, **self.variants.get(pod, {}))

    def engines(self) -> tuple[EngineSpec, ...]:
        return tuple(self.engine(pod) for pod in self.pods)

    def listeners(self) -> list[tuple[str, str, int]]:
        """(part, host, port) of everything the fleet binds."""
        engines = [row for engine in self.engines() for row in engine.address.listeners()]
        return [*self.addresses.control.listeners(), *engines]

    def memory(self) -> MemoryPlan:
        """Upper bound: full tiers, and for every pod three processes (engine, mover, sidecar)."""
        pods = len(self.pods)
        shm_bytes = pods * self.cpu_tier_tokens * self.kv_bytes_per_token
        device_bytes = pods * self.device_tier_tokens * self.kv_bytes_per_token
        processes_bytes = (3 * pods + 2) * _PROCESS_BYTES + _ENVOY_BYTES
        return MemoryPlan(shm_bytes + device_bytes + processes_bytes, shm_bytes)
