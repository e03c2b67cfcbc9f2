"""Vocabulary of messages the *EPP* receives from, and answers to, the gateway. Constants only.

Source: Gateway API Inference Extension, Endpoint Picker Protocol v1 (proposal 004); llm-d-router at
ebab687 for the `x-llm-d-*` names and reasons.
"""

from __future__ import annotations

from typing import Final

from sidecar.wire import DESTINATION as DESTINATION  # request header and metadata key

DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
METADATA_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
ATTRIBUTES_NAMESPACE: Final = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS: Final = "upstream.address"

REQUEST_ID: Final = "x-request-id"
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"

# reasons in DROPPED_REASON
REASON_NO_ENDPOINTS: Final = "rejected-no-endpoints"
REASON_TIMED_OUT: Final = "rejected-ttl-expired"
REASON_TOO_LARGE: Final = "payload-too-large"
REASON_INTERNAL: Final = "internal"
REASON_UNSUPPORTED_MODE: Final = "unsupported-body-mode"

MAX_BODY_CHUNK_BYTES: Final = 62_000

SERVICE_NAME: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_LIVENESS: Final = "liveness"
HEALTH_SERVICES: Final = ("", HEALTH_LIVENESS, "readiness", SERVICE_NAME)
