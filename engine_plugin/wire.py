"""Vocabulary of messages the *engine* receives or publishes: constants and formatters only.

Each name exists once in the repository. Sources: llm-d-router at ebab687 (kv_transfer_params keys),
vLLM 0.32 (`OffloadingConnector`, `NixlConnector`), our own metrics.
Nothing here parses, decides or does I/O.
"""

from __future__ import annotations

from typing import Any, Final

# --- peer-to-peer control channel ---------------------------------------------------------------
P2P_PROTOCOL_VERSION: Final = 2  # also the `protocol` label of kvpull_engine_info

# --- request body -----------------------------------------------------------------------------
KV_TRANSFER_PARAMS: Final = "kv_transfer_params"

# offloading connector: each key names the *remote counterpart* of the leg that carries it
REMOTE_KV_SOURCE: Final = "remote_kv_source"
REMOTE_PREFILLER: Final = "remote_prefiller"
REMOTE_DECODER: Final = "remote_decoder"
KV_REQUEST_ID: Final = "kv_request_id"
REMOTE_HOST: Final = "remote_host"
REMOTE_PORT: Final = "remote_port"

# nixlv2 connector
DO_REMOTE_DECODE: Final = "do_remote_decode"
DO_REMOTE_PREFILL: Final = "do_remote_prefill"
REMOTE_ENGINE_ID: Final = "remote_engine_id"
REMOTE_BLOCK_IDS: Final = "remote_block_ids"

# --- /metrics, published by the plugin and by the emulated engine ------------------------------
ENGINE_INFO: Final = "kvpull_engine_info"
ENGINE_INFO_LABELS: Final = (
    "instance",
    "rank",
    "p2p_addr",
    "events_port",
    "replay_port",
    "reports_port",
    "block_size",
    "hash_algo",
    "seed_fp",
    "model_fp",
    "layout_fp",
    "protocol",
)
PEER_REFUSED_TOTAL: Final = "kvpull_peer_refused_total"  # labels: peer, reason
PULL_RECEIVED_BYTES_TOTAL: Final = "kvpull_pull_received_bytes_total"  # consumer; label: peer
PULL_SERVED_BYTES_TOTAL: Final = "kvpull_pull_served_bytes_total"  # producer; label: peer
PULLS_TOTAL: Final = "kvpull_pulls_total"  # consumer; label: reason
SESSION_SETUP_SECONDS: Final = "kvpull_session_setup_seconds"  # consumer; histogram
TRANSFER_SECONDS: Final = "kvpull_transfer_seconds"  # consumer; histogram
HANDSHAKES_UNFINISHED_TOTAL: Final = "kvpull_handshakes_unfinished_total"  # producer
CPU_TIER_FILL: Final = "kvpull_cpu_tier_fill_perc"  # gauge, 0..1
LEASES: Final = "kvpull_leases"  # producer; gauge of leases held now
PEER_KEYS: Final = "kvpull_peer_keys"  # gauge; label: key, a public name of it; see `key_state`

# --- KV events (vLLM 0.32 kv_events) ------------------------------------------------------------
MEDIUM_DEVICE: Final = "GPU"
MEDIUM_CPU: Final = "CPU"

# --- default ports; rank r uses default + r ----------------------------------------------------
P2P_PORT: Final = 7777
EVENTS_PORT: Final = 5557
REPLAY_PORT: Final = 5657


def key_state(key_id: str, in_force: tuple[str, ...]) -> int:
    """Value of `kvpull_peer_keys`: 2 shown to peers (the first in force), 1 accepted of them, 0 no longer."""
    return 2 if in_force[:1] == (key_id,) else int(key_id in in_force)


def kv_source_params(kv_request_id: str, host: str, port: int) -> dict[str, Any]:
    """Value of `remote_kv_source` or `remote_prefiller`: where to fetch, and under which id."""
    return {KV_REQUEST_ID: kv_request_id, REMOTE_HOST: host, REMOTE_PORT: port}


def nixl_prefill_params() -> dict[str, Any]:
    """`kv_transfer_params` of a nixlv2 prefill leg, before the engine has filled it in."""
    return {
        DO_REMOTE_DECODE: True,
        DO_REMOTE_PREFILL: False,
        REMOTE_ENGINE_ID: None,
        REMOTE_BLOCK_IDS: None,
        REMOTE_HOST: None,
        REMOTE_PORT: None,
    }
