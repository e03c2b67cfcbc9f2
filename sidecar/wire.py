"""Vocabulary of messages the *sidecar* receives: routing request headers. Constants only.

Source: llm-d-router at ebab687 (header names); `x-kvpull-*` are ours. Values are `ip:port` of the
*serving* port (the sidecar's), never of the P2P port.
"""

from __future__ import annotations

from typing import Final

PREFILLER_HOST_PORT: Final = "x-prefiller-host-port"
KV_CACHE_SOURCE_HOST_PORT: Final = "x-kv-cache-source-host-port"
DATA_PARALLEL_HOST_PORT: Final = "x-data-parallel-host-port"
ENCODER_HOSTS_PORTS: Final = "x-encoder-hosts-ports"
DECISION_ID: Final = "x-kvpull-decision-id"
ROUTING_AUTH: Final = "x-kvpull-routing-auth"
# set by a sidecar on the prefill leg it sends to a peer's sidecar: "the kv_transfer_params in this
# body are mine, keep them"; believed only with a valid signature or from a pool member's address
LEG: Final = "x-kvpull-leg"
LEG_PREFILL: Final = "prefill"

# what a client must never be able to set: removed at the gateway, overwritten or removed by the EPP
ROUTING_HEADERS: Final = (
    PREFILLER_HOST_PORT,
    KV_CACHE_SOURCE_HOST_PORT,
    DATA_PARALLEL_HOST_PORT,
    ENCODER_HOSTS_PORTS,
    DECISION_ID,
    ROUTING_AUTH,
    LEG,
)

REQUEST_ID: Final = "x-request-id"
# the gateway's own header, still there when the request arrives; a list where there are fallbacks.
# Part of what ROUTING_AUTH signs
DESTINATION: Final = "x-gateway-destination-endpoint"
