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

# what a request may say of itself: the name and its older one; the new name wins
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_ID: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
MODEL_NAME_REWRITE: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
DEFAULT_FAIRNESS_ID: Final = "default-flow"
PREFER: Final = "prefer"
IF_AVAILABLE: Final = "if-available"  # a preference: 412 where the prompt is in no cache

REQUEST_ID: Final = "x-request-id"
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"

# reasons in DROPPED_REASON
REASON_NO_ENDPOINTS: Final = "rejected-no-endpoints"
REASON_TIMED_OUT: Final = "rejected-ttl-expired"
REASON_TOO_LARGE: Final = "payload-too-large"
REASON_INTERNAL: Final = "internal"
REASON_UNSUPPORTED_MODE: Final = "unsupported-body-mode"

SERVED_UNKNOWN: Final = "fail: the gateway did not say which endpoint served"
# doubles of the Gateway API Inference Extension's conformance tests
TEST_SELECTION: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"

MAX_BODY_CHUNK_BYTES: Final = 62_000

SERVICE_NAME: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_LIVENESS: Final = "liveness"
HEALTH_SERVICES: Final = ("", HEALTH_LIVENESS, "readiness", SERVICE_NAME)
