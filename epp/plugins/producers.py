"""Parameters of data producers and sources. They configure shells and the source rule; they hold no
policy themselves. Names, aliases and defaults: llm-d-router at ebab687.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field

from epp.plugins.parameters import MAX_TOKENS, DurationS, Parameters, Weight

MAX_SPECULATIVE_TTL_S = 3_600.0


class TokenProcessorConfig(Parameters):
    """Accepted for drop-in use. The index learns every engine's own block size from its events, so
    these values are compared with what engines report, never used to re-chunk."""

    block_size_tokens: int | None = Field(
        default=None, validation_alias=AliasChoices("blockSizeTokens", "blockSize")
    )
    hash_seed: str | None = None
    hash_algorithm: str | None = None


class BackendWeight(Parameters):
    name: str
    weight: Weight


class IndexerConfig(Parameters):
    """`kvBlockIndexConfig` (entry counts, Redis) has no meaning here: holders are never evicted by
    count. It is accepted and reported as ignored."""

    kv_block_index_config: dict[str, Any] | None = None
    kv_cache_backend_configs: list[BackendWeight] = Field(default_factory=list)


class PodDiscoveryConfig(Parameters):
    pod_label_selector: str | None = None
    pod_namespace: str | None = None
    socket_port: int = 5557  # base port of KV events; + rank
    replay_socket_port: int | None = None  # base port of replay; + rank; absent: from the endpoint's row


class KvEventsConfig(Parameters):
    topic_filter: str | None = None  # identity comes from the connection, so topics are not filtered
    zmq_endpoint: str | None = None
    concurrency: int | None = None
    engine_type: str | None = None
    discover_pods: bool | None = None
    pod_discovery_config: PodDiscoveryConfig | None = None


class PrecisePrefixCacheProducerParameters(Parameters):
    token_processor_config: TokenProcessorConfig = Field(default_factory=TokenProcessorConfig)
    indexer_config: IndexerConfig = Field(default_factory=IndexerConfig)
    kv_events_config: KvEventsConfig = Field(default_factory=KvEventsConfig)
    speculative_indexing: bool = False  # expect a routed prompt's blocks before events confirm them
    speculative_ttl: DurationS = Field(
        default=2.0, alias="speculativeTTL", gt=0.0, le=MAX_SPECULATIVE_TTL_S
    )  # written "2s"; how long an unconfirmed entry counts


class P2PSourceProducerParameters(Parameters):
    prefix_match_info_producer_name: str | None = None
    min_cached_token_delta: int | None = Field(default=None, ge=1, le=MAX_TOKENS)  # tokens
    prefill_profile_name: str = "prefill"


class LocalTokenizerParameters(Parameters):
    path: str  # directory with tokenizer.json and chat_template.jinja


class TokenProducerParameters(Parameters):
    model_name: str | None = None
    served_model_names: list[str] = Field(default_factory=list)  # aliases of the base model, no adapters
    local: LocalTokenizerParameters | None = None


class FileDiscoveryParameters(Parameters):
    path: str
    watch_file: bool = True


class DisaggProfiles(Parameters):
    decode: str = "decode"
    prefill: str = "prefill"


class DisaggDeciders(Parameters):
    prefill: str


class DisaggProfileHandlerParameters(Parameters):
    profiles: DisaggProfiles = Field(default_factory=DisaggProfiles)
    deciders: DisaggDeciders
