"""Fleet and engines with vLLM in them: values, argv and environment.

Sizes are chosen for two cores and 4K prefixes: a document takes some seconds to compute, two of them do not
fit the device cache beside a third, and the CPU tier keeps everything the scenario asks for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deploy.local.fleet import Fleet
from deploy.local.ports import AddressPlan
from deploy.local.preflight import MemoryPlan
from deploy.local.run_files import RunFiles
from deploy.local.spec import EngineSpec, FleetSpec
from deploy.local.supervisor import PartSpec
from deploy.local.vllm.environment import PYTHON, environment
from deploy.local.vllm.site import make_site
from deploy.local.vllm.weights import Shape, write_model

SHAPE: Final = Shape(hidden=256, layers=4, heads=4, kv_heads=2, inner=704)  # 2 KiB of KV a token
BLOCK_TOKENS: Final = 32  # the CPU attention takes multiples of 32 only
PODS: Final = ("engine-a", "engine-b", "engine-c")
MAX_MODEL_TOKENS: Final = 8192
_START_S: Final = 900.0  # about 40 s on a quiet machine with two cores, minutes on a busy one
_REQUEST_S: Final = 300.0
_STOP_S: Final = 90.0  # killed sooner, vLLM leaves its own shared memory behind (psm_*, not the CPU tier's)
_ENGINE_BYTES: Final = 1400 << 20  # three processes of one engine without its caches, measured


@dataclass(frozen=True, slots=True)
class VllmFleetSpec(FleetSpec):
    """A `FleetSpec` whose engines are real. `device_tier_tokens` is rounded down to whole blocks."""

    def memory(self) -> MemoryPlan:
        """Upper bound, as of the emulated fleet."""
        emulated = FleetSpec.memory(self)
        return MemoryPlan(emulated.total_bytes + len(self.pods) * _ENGINE_BYTES, emulated.shm_bytes)


def vllm_spec(addresses: AddressPlan, out_dir: Path, pods: tuple[str, ...] = PODS) -> VllmFleetSpec:
    """The fleet of `make demo ENGINE=vllm`, or a part of it.

    vLLM binds KV events to every interface, so engines of one machine need ports of their own.
    """
    variants: dict[str, Mapping[str, Any]] = {}
    for at, pod in enumerate(pods):
        address = addresses.engine(at + 1, pod)
        moved = replace(address, events_port=address.events_port + at, replay_port=address.replay_port + at)
        variants[pod] = {"address": moved}
    return VllmFleetSpec(
        addresses,
        out_dir=out_dir,
        pods=pods,
        block_size=BLOCK_TOKENS,
        kv_bytes_per_token=SHAPE.kv_bytes_per_token,
        device_tier_tokens=10_240,
        cpu_tier_tokens=81_920,
        max_num_seqs=2,
        request_timeout_s=_REQUEST_S,
        variants=variants,
    )


class VllmFleet(Fleet):
    """A fleet whose engines are vLLM processes; the model and the plugin's site are made at its start."""

    async def start(self) -> None:
        """As `Fleet.start`."""
        directory = self.spec.run_dir
        model = directory / "model"
        shutil.copytree(self.spec.tokenizer, model)
        names = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        write_model(model, bos=names["bos_token"], eos=names["eos_token"], shape=SHAPE)
        make_site(directory)
        await super().start()

    def engine_part(self, engine: EngineSpec) -> PartSpec:
        """vLLM instead of the emulated engine."""
        url = f"{self.engine(engine.pod).url}/health"

        async def answers() -> bool:
            return await self.page(url) is not None

        argv = (str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(self.spec.run_dir / "model"))
        return PartSpec(
            engine.pod,
            (*argv, *_arguments(self.spec, engine, self.files)),
            environment(threads=1) | {"PYTHONPATH": str(self.spec.run_dir / "site")},
            self.spec.run_dir,
            probe=answers,
            ready_timeout_s=_START_S,
            stop_timeout_s=_STOP_S,
        )


def _arguments(spec: FleetSpec, engine: EngineSpec, files: RunFiles) -> list[str]:
    address = engine.address
    options = {
        "--served-model-name": spec.model,
        "--host": address.host,
        "--port": str(address.engine_port),
        "--dtype": "bfloat16",
        "--block-size": str(engine.block_size),
        "--max-model-len": str(MAX_MODEL_TOKENS),
        "--max-num-seqs": str(spec.max_num_seqs),
        "--num-gpu-blocks-override": str(engine.device_tier_tokens // engine.block_size),
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--kv-transfer-config": json.dumps(_transfer(spec, engine, files)),
        "--kv-events-config": json.dumps(_events(spec, engine)),
    }
    flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    return flags + [word for option in options.items() for word in option]


def _transfer(spec: FleetSpec, engine: EngineSpec, files: RunFiles) -> dict[str, Any]:
    address = engine.address
    tier = {
        "type": "kvpull",
        "host": address.host,
        "port": address.p2p_port,
        "peer_key_file": str(files.peer_key_file),
        "model": spec.model,
        "events_port": address.events_port,
        "replay_port": address.replay_port,
        "max_extra_ttft_s": 20.0,  # bytes are judged here, and two cores carry the whole fleet
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "PullOffloadingSpec",
            "cpu_bytes_to_use": engine.cpu_tier_tokens * spec.kv_bytes_per_token,
            "self_describing_kv_events": True,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        },
    }


def _events(spec: FleetSpec, engine: EngineSpec) -> dict[str, Any]:
    address = engine.address
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{address.events_port}",
        "replay_endpoint": f"tcp://*:{address.replay_port}",
        "topic": f"kv@{engine.pod}@{spec.model}",
        "buffer_steps": 10_000,
    }
