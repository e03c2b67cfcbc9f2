"""Plugin types of the reference that are not part of kvpull: each with what to use instead.

They are refused by name: a configuration that asks for one would behave differently without it.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREDICTED = "it needs the latency predictor's sidecars; use token-load-scorer and queue-scorer"
_MULTICLUSTER = "one picker serves one cluster; use the plugin of the same name without `multicluster-`"
_ENCODE = "encode disaggregation is not supported; prompts with images are served by the decode endpoint"
_MULTIMODAL = "images are not matched; use prefix-cache-scorer, which matches the text of a prompt"
_GPU = "the engine's own metrics are read instead; use kv-cache-utilization-scorer or utilization-filter"
_HEADERS = "disagg-profile-handler sets the routing headers itself; take it out"
_ROLLOUT = "drain endpoints with their pool; a draining one gets nothing new"
_CONFORMANCE = "--conformance-headers does it"
_NEVER_KILLED = (
    "requests that run are never killed; priority-holdback-policy keeps room for higher priorities"
)

NOT_SUPPORTED: Mapping[str, str] = {
    # filters
    "endpoint-attribute-filter": "use utilization-filter for load, label-selector-filter for labels",
    "slo-headroom-tier-filter": _PREDICTED,
    "multicluster-session-affinity-filter": _MULTICLUSTER,
    "by-label": "use label-selector-filter with matchExpressions",
    "by-label-selector": "use label-selector-filter",
    # scorers
    "latency-scorer": _PREDICTED,
    "mm-embeddings-cache-scorer": _MULTIMODAL,
    "context-length-aware": "use label-selector-filter in a profile of its own",
    "endpoint-attribute-scorer": "use queue-scorer, running-requests-size-scorer or "
    "kv-cache-utilization-scorer",
    "header-label-affinity-scorer": "use session-affinity-scorer",
    "precise-prefix-cache-scorer": "use precise-prefix-cache-producer with prefix-cache-scorer",
    "multicluster-queue-scorer": _MULTICLUSTER,
    "multicluster-kv-cache-utilization-scorer": _MULTICLUSTER,
    "multicluster-prefix-cache-scorer": _MULTICLUSTER,
    # handlers and deciders
    "always-disagg-multimodal-decider": _ENCODE,
    "header-profile-handler": "use disagg-profile-handler",
    "pd-profile-handler": "use disagg-profile-handler",
    "disagg-headers-handler": _HEADERS,
    "prefill-header-handler": _HEADERS,
    # producers
    "predicted-latency-producer": _PREDICTED,
    "burst-prefix-cache-producer": "use precise-prefix-cache-producer with speculativeIndexing: true, which "
    "sends a burst of prompts with a common prefix to one endpoint",
    "mm-embeddings-cache-producer": _MULTIMODAL,
    "multicluster-approx-prefix-cache-producer": _MULTICLUSTER,
    # request control
    "latency-slo-admitter": _PREDICTED,
    "probabilistic-admitter": "use flowControl with utilization-detector or concurrency-detector",
    "request-attribute-reporter": "usage is in kvpull's own metrics and its decision ledger",
    "disaggregatedset-rollout-screener": _ROLLOUT,
    # flow control
    "eviction-sheddable-filter": _NEVER_KILLED,
    "eviction-priority-then-time-ordering": _NEVER_KILLED,
    "sheddable-eviction-filter": _NEVER_KILLED,
    "priority-then-time-eviction-order-policy": _NEVER_KILLED,
    # data layer
    "k8s-notification-source": "the pool is watched by --pool-name; take it out",
    "models-data-source": "an engine's base model is read from its metrics; take it out",
    "models-data-extractor": "an engine's base model is read from its metrics; take it out",
    "dcgm-data-source": _GPU,
    "dcgm-extractor": _GPU,
    "multicluster-metrics-data-source": _MULTICLUSTER,
    # parsers
    "sglanghttp-parser": "use openai-parser: SGLang's OpenAI paths are understood",
    "vertexai-parser": "use passthrough-parser, which routes by load",
    "multicluster-file-discovery": "one picker serves one cluster; use file-discovery",
    "multicluster-metrics-extractor": "one picker serves one cluster; use core-metrics-extractor",
    "disaggregatedset-rollout-pod-extractor": _ROLLOUT,
    "local-syncer": "each replica counts what it has sent itself; several replicas: docs/kubernetes.md",
    "header-based-testing-filter": _CONFORMANCE,
    "destination-endpoint-served-verifier": _CONFORMANCE,
}
