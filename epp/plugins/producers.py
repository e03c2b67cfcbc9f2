"""Parameters of data producers and sources. They configure shells and the source rule; they hold no
policy themselves. Names, aliases and defaults: llm-d-router at ebab687.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from epp.plugins.parameters import MAX_TOKENS, DurationS, HeaderName, Parameters, Weight
from epp.plugins.plugin_type import PREFIX_NEED, Data, HeaderSource, Kind, Need, PluginType

MAX_SPECULATIVE_TTL_S = 3_600.0
MAX_BLOCK_SIZE_TOKENS = 1 << 20


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
    cost_model: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _no_costs(self) -> P2PSourceProducerParameters:
        if self.cost_model is not None:
            raise ValueError(
                "costModel: what a pull costs is learned for each pair here; take it out, and write "
                "`cost: {mode: cost}` in a PullThresholds document (docs/pulls.md)"
            )
        return self


class LocalTokenizerParameters(Parameters):
    """The model's tokenizer in this process. The last four say how the engines' servers were started, under
    the names of those flags: they change tokens."""

    path: str  # directory with tokenizer.json, tokenizer_config.json, chat_template.jinja
    chat_template_path: str | None = None  # a file, where the engines run with --chat-template
    cache_size_mib: int = Field(
        default=256, ge=0, le=1 << 20, alias="cacheSizeMiB"
    )  # ids of texts seen before
    workers: int | None = Field(default=None, ge=1, le=64)  # threads; absent: one core is left to the loop
    default_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    anthropic_disabled_thinking_effort: Literal["auto", "none", "low", "medium", "high", "xhigh", "max"] = (
        "auto"
    )


class VllmTokenizerParameters(Parameters):
    """vLLM's render endpoint (`--enable-scale-out`, or `vllm launch render`)."""

    url: str = Field(default="http://localhost:8000", pattern=r"^https?://[^/@?#\s]+$")
    pool: bool = False  # ask the pool's own endpoints in turn, at their serving ports, instead of `url`
    # most it adds to a request; absent: --tokenizer-budget (reference: 5s)
    timeout: Annotated[DurationS, Field(gt=0.0)] | None = None
    # the same for prompts with pictures and the like; absent: not asked, for it fetches and decodes them
    mm_timeout: Annotated[DurationS, Field(gt=0.0)] | None = None
    ca_cert_path: str | None = None  # PEM file; with `pool` also: the endpoints speak https
    client_cert_path: str | None = None
    client_key_path: str | None = None
    insecure_skip_verify: bool = False
    api_key_path: str | None = None  # file with the key that vLLM was given as --api-key
    max_in_flight: int = Field(default=32, ge=1, le=4096)  # more are routed by load at once
    max_answer_bytes: int = Field(default=4 << 20, ge=1024, le=64 << 20)

    @model_validator(mode="after")
    def _one_address(self) -> VllmTokenizerParameters:
        if self.pool and "url" in self.model_fields_set:
            raise ValueError("url and pool: one of them is allowed")
        return self


class TokenProducerParameters(Parameters):
    """One back end. None of them, or `estimate`, means an estimate by length, as in the reference."""

    model_name: str | None = None  # the base model; sent to vLLM
    served_model_names: list[str] = Field(default_factory=list)  # aliases of the base model, no adapters
    local: LocalTokenizerParameters | None = None
    vllm: VllmTokenizerParameters | None = None
    estimate: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_back_end(self) -> TokenProducerParameters:
        given = [name for name in ("local", "vllm", "estimate") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: one back end is allowed")
        return self

    @property
    def exact(self) -> bool:
        """False: it would only estimate."""
        return self.local is not None or self.vllm is not None


class ApproxPrefixCacheProducerParameters(Parameters):
    """What endpoints hold, guessed from what was sent there: no events needed. The reference keeps an
    LRU of blocks; here prompts lose their tails first (a tree), so that the common head goes last."""

    auto_tune: bool = True  # capacity as an engine reports its cache; where it does not, the one below
    block_size_tokens: int = Field(default=16, ge=1, le=MAX_BLOCK_SIZE_TOKENS)  # at least 64 is used
    block_size: int | None = None
    lru_capacity_per_server: int = Field(default=31_250, ge=1, le=1 << 28)  # blocks of one endpoint
    max_prefix_tokens_to_match: int = Field(default=131_072, ge=0, le=MAX_TOKENS)  # 0: see blocks
    max_prefix_blocks_to_match: int = Field(default=2_048, ge=1, le=1 << 24)  # where tokens are 0


class InflightLoadProducerParameters(Parameters):
    """What this picker has sent and not seen the end of, held as leases."""

    add_estimated_output_tokens: bool = False
    output_ratio: float = Field(default=1.5, ge=0.0, le=1_000.0)  # output tokens per prompt token
    max_estimated_output_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    prefix_match_info_producer_name: str | None = None
    sync_cross_replica_state: bool = False


class SessionIdProducerParameters(Parameters):
    """Attribute `session-id`."""

    header_name: HeaderName | None = None
    cookie_name: str | None = None

    @model_validator(mode="after")
    def _one(self) -> SessionIdProducerParameters:
        if (self.header_name is None) == (self.cookie_name is None):
            raise ValueError("give either headerName or cookieName")
        return self

    @property
    def source(self) -> HeaderSource:
        return (
            HeaderSource(self.header_name) if self.header_name else HeaderSource("cookie", self.cookie_name)
        )


def _names_producer(parameters: InflightLoadProducerParameters) -> bool:
    return parameters.prefix_match_info_producer_name is not None


AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")


class AgentIdentityParameters(Parameters):
    """Attribute `agent-identity`, and the flow of requests that name no other."""

    additional_session_headers: list[HeaderName] = Field(
        default_factory=list
    )  # looked at before the known ones

    @property
    def header_names(self) -> tuple[str, ...]:
        """The first one that has a value counts."""
        return (*self.additional_session_headers, *AGENT_HEADERS)

    @property
    def sources(self) -> tuple[HeaderSource, ...]:
        return tuple(map(HeaderSource, self.header_names))


class DisaggProfiles(Parameters):
    decode: str = "decode"
    prefill: str = "prefill"
    encode: str | None = None


class DisaggDeciders(Parameters):
    prefill: str | None = None
    encode: str | None = None


# flat names that the reference still takes; the last one gives way to the others
_OLDER_NAMES = {
    "decodeProfile": ("profiles", "decode"),
    "prefillProfile": ("profiles", "prefill"),
    "encodeProfile": ("profiles", "encode"),
    "prefillDeciderPluginName": ("deciders", "prefill"),
    "encodeDeciderPluginName": ("deciders", "encode"),
    "deciderPluginName": ("deciders", "prefill"),
}


class DisaggProfileHandlerParameters(Parameters):
    """`whenNoPrefill` is ours: what happens to a request that is to be split when no prefill endpoint is
    there. `decode`: it is computed where it is served, and that is counted."""

    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: DisaggProfiles = Field(default_factory=DisaggProfiles)
    deciders: DisaggDeciders = Field(default_factory=DisaggDeciders)
    when_no_prefill: Literal["refuse", "decode"] = "refuse"

    @model_validator(mode="before")
    @classmethod
    def _in_new_words(cls, given: Any) -> Any:
        """As in the reference, older names count only where neither `profiles` nor `deciders` is given."""
        older = [name for name in _OLDER_NAMES if isinstance(given, dict) and name in given]
        if not older:
            return given
        if "profiles" in given or "deciders" in given:
            raise ValueError(f"{older[0]} is an older spelling: it goes with neither profiles nor deciders")
        changed = {name: value for name, value in given.items() if name not in _OLDER_NAMES}
        for name in older:
            group, key = _OLDER_NAMES[name]
            changed.setdefault(group, {}).setdefault(key, given[name])
        return changed

    @model_validator(mode="after")
    def _stages(self) -> DisaggProfileHandlerParameters:
        if self.deciders.encode is not None:
            raise ValueError(
                "deciders.encode: encode disaggregation is not part of kvpull; leave it out, and prompts "
                "with images are served by the decode endpoint"
            )
        if self.stage_order == "prefill-first" and self.deciders.prefill is not None:
            raise ValueError(
                "deciders.prefill: prefill-first always has a prefill stage; take the decider out"
            )
        return self


class DataParallelProfileHandlerParameters(Parameters):
    """For gateways that can send to one port of a pod only; deprecated in the reference."""

    primary_port: int = Field(default=8000, ge=1, le=65_535)  # where the pod's sidecar listens


_LEARNED = "the index learns every engine's own block size and hashing from its events"
ROWS = (
    PluginType("single-profile-handler", Kind.PROFILE_HANDLER),
    PluginType("data-parallel-profile-handler", Kind.PROFILE_HANDLER, DataParallelProfileHandlerParameters),
    PluginType("disagg-profile-handler", Kind.PROFILE_HANDLER, DisaggProfileHandlerParameters),
    PluginType(
        "precise-prefix-cache-producer",
        Kind.PRODUCER,
        PrecisePrefixCacheProducerParameters,
        needs=(Need(Data.TOKENS, optional=True),),  # else --tokenizer
        provides=Data.PREFIX_MATCH,
        ignored={
            "token_processor_config": _LEARNED,
            "indexer_config.kv_block_index_config": "holders are never evicted by count",
            "kv_events_config.zmq_endpoint": "every engine is dialled at its own events port",
            "kv_events_config.topic_filter": "an engine is known by its connection, not by its topic",
            "kv_events_config.concurrency": "one loop reads all engines",
            "kv_events_config.engine_type": "vLLM's and SGLang's events are told apart by their content",
            "kv_events_config.discover_pods": "every endpoint of the pool is subscribed to",
            "kv_events_config.pod_discovery_config": "the pool says which pods and ports there are",
        },
    ),
    PluginType(
        "approx-prefix-cache-producer",
        Kind.PRODUCER,
        ApproxPrefixCacheProducerParameters,
        needs=(Need(Data.TOKENS),),
        ignored={"block_size": "it counted characters; blockSizeTokens counts tokens"},
        provides=Data.PREFIX_MATCH,
    ),
    PluginType(
        "p2p-source-producer",
        Kind.PRODUCER,
        P2PSourceProducerParameters,
        needs=(PREFIX_NEED,),
        ignored={"prefill_profile_name": "a source is named for wherever the prompt is computed"},
    ),
    PluginType("token-producer", Kind.PRODUCER, TokenProducerParameters, provides=Data.TOKENS),
    PluginType(
        "inflight-load-producer",
        Kind.PRODUCER,
        InflightLoadProducerParameters,
        needs=(Need(Data.PREFIX_MATCH, "prefix_match_info_producer_name", _names_producer),),
        provides=Data.INFLIGHT_LOAD,
        ignored={"sync_cross_replica_state": "each replica counts what it has sent itself"},
    ),
    PluginType("session-id-producer", Kind.PRODUCER, SessionIdProducerParameters),
    PluginType("agent-identity", Kind.PRODUCER, AgentIdentityParameters),
)
