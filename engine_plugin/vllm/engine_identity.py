"""Who this engine is to its peers: `PeerIdentity` from vLLM's configuration and its real hash function."""

from __future__ import annotations

import uuid
from typing import Any

from engine_plugin.identity import Address, PeerIdentity, fingerprint
from engine_plugin.vllm import compat
from engine_plugin.vllm.tier_config import TierConfig


class UnsupportedCache(ValueError):
    """A cache that pulls cannot serve yet; the message says which."""


def check_cache(spec: Any) -> None:
    """One group of full-attention blocks, in vLLM's direct layout. Raises UnsupportedCache."""
    groups = len(spec.config.groups)
    if groups != 1:
        raise UnsupportedCache(
            f"kvpull moves the blocks of one KV-cache group, and this model has {groups} "
            "(sliding-window and Mamba layers prove no prefix)"
        )
    if spec.config.canonical_layout:
        raise UnsupportedCache("kvpull does not know vLLM's canonical_layout: remove it")


def tier_tokens(spec: Any) -> int:
    """Tokens of one block of the CPU tier."""
    return int(spec.tokens_per_block[0]) * int(spec.blocks_per_chunk)


def rank_of(spec: Any) -> int:
    """Data-parallel rank of this engine."""
    return int(spec.config.parallel.data_parallel_index)


def listen_address(spec: Any, config: TierConfig) -> Address:
    """Where this rank listens and what its peers dial."""
    host = config.host
    if not host:
        from vllm.utils.network_utils import get_ip

        host = str(get_ip())
    return host, port_of(config.port, spec)


def port_of(port: int, spec: Any) -> int:
    """This rank's port, where `port` is the first rank's; 0 stays "any"."""
    return port + rank_of(spec) if port else 0


def layout_of(spec: Any) -> str:
    """Everything that decides where a byte of a block lies, short enough for a label."""
    parallel, groups = spec.config.parallel, spec.config.groups
    parts = (
        spec.config.kv_cache_layout,
        [(group.tokens_per_block, group.layer_names) for group in groups],
        (parallel.world_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
        (spec.config.worker_kv_bytes_per_block, spec.blocks_per_chunk, bool(spec.replicated_layout)),
    )
    return f"vllm-{spec.config.kv_cache_layout}-{fingerprint(repr(parts))}"


def new_instance() -> str:
    """Another one at every start, so that an old self is never taken for a peer."""
    return uuid.uuid4().hex


def engine_identity(spec: Any, config: TierConfig, block_bytes: int, instance: str) -> PeerIdentity | None:
    """None until the engine has chosen its block hashes."""
    facts = compat.hash_facts()
    if facts is None:
        return None
    algorithm, seed = facts
    return PeerIdentity(
        instance=instance,
        rank=rank_of(spec),
        model=config.model or spec.config.model.name,
        revision=config.revision,
        block_size_tokens=tier_tokens(spec),
        block_bytes=block_bytes,
        dtype=spec.config.model.dtype,
        layout=layout_of(spec),
        tp_size=int(spec.config.parallel.tp_size),
        hash_algo=algorithm,
        seed_fp=fingerprint(seed),
    )
