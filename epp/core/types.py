"""Values the core works on: frozen, slotted, units in the names. No gRPC, HTTP or Kubernetes type.

What engines say of themselves is in `engine_facts` and importable from here.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NewType

from engine_plugin.identity import EndpointId
from epp.core.engine_facts import UNKNOWN_METRICS as UNKNOWN_METRICS
from epp.core.engine_facts import ClaimState as ClaimState
from epp.core.engine_facts import EndpointMetrics as EndpointMetrics
from epp.core.engine_facts import EngineInfo as EngineInfo
from epp.core.engine_facts import LoraState as LoraState
from epp.core.forecast import Forecast
from epp.core.pull_curves import PullPrediction

if TYPE_CHECKING:
    from epp.core.outlook import Outlook

BlockKey = NewType("BlockKey", int)  # ours: chained 64-bit hash of the prompt's tokens
# upper bounds of gaps between two pieces of output
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

EngineBlockHash = NewType("EngineBlockHash", int)  # the engine's own name of a block, opaque
BYTES_PER_TOKEN = 4  # estimate, as in the reference


class CacheTier(enum.IntFlag):
    """Where an engine holds a block. A set of tiers is an OR of these."""

    NONE = 0
    DEVICE = 1
    CPU = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One schedulable engine rank. `host:port` is the *serving* address (the sidecar's)."""

    id: EndpointId
    host: str
    port: int
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    p2p_address: str = ""  # `ip:port` of its peer-to-peer control channel, where its row says so

    @property
    def address(self) -> str:
        """`ip:port`, IPv6 in brackets: the value of the destination header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class InflightLoad:
    """What this picker itself has sent to an endpoint and not yet seen the end of."""

    requests: int = 0
    uncached_prompt_tokens: int = 0  # until first token
    pulls_served: int = 0  # pulls named with this endpoint as source, still outstanding
    output_tokens: int = 0  # estimated, until the end; 0 unless the in-flight producer estimates them

    @property
    def tokens(self) -> int:
        """Work in tokens that is on its way or under way."""
        return self.uncached_prompt_tokens + self.output_tokens


NO_LOAD = InflightLoad()


class PrefixMatch(NamedTuple):
    """How much of one prompt an endpoint holds, contiguous from block 0, in blocks of its own size.

    `blocks` ORs the tiers per block; `device_blocks` and `cpu_blocks` are the contiguous prefix in
    that tier alone (a peer can serve the CPU prefix). `speculative_blocks` is how far the prompt is
    expected here because another request with it was just sent; 0 unless that is beyond `blocks`.
    Meaningless unless `state.has_claim`. A tuple, because a decision makes one for every endpoint: that
    costs a fifth of a frozen dataclass.
    """

    state: ClaimState = ClaimState.UNKNOWN
    blocks: int = 0
    device_blocks: int = 0
    cpu_blocks: int = 0
    block_size_tokens: int = 0
    known_empty_start: bool = False  # we saw this engine from its first event on
    speculative_blocks: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens the engine has reported."""
        return self.blocks * self.block_size_tokens if self.state.has_claim else 0

    @property
    def expected_blocks(self) -> int:
        """Confirmed or on their way, whichever reaches further: a lower bound of both together, since
        speculative blocks may fill a hole in front of confirmed ones."""
        return self.speculative_blocks if self.speculative_blocks > self.blocks else self.blocks

    @property
    def expected_tokens(self) -> int:
        """Tokens a request that runs here need not compute anew: for placement and for the computing
        side of a pull, never for what a peer could serve."""
        return self.expected_blocks * self.block_size_tokens if self.state.has_claim else 0

    def holds_whole_of(self, prompt_tokens: int) -> bool:
        """Whether every whole block of a prompt is here, and there is one."""
        size = self.block_size_tokens
        return 0 < size <= prompt_tokens and self.cached_tokens >= prompt_tokens - prompt_tokens % size

    @property
    def servable_tokens(self) -> int:
        """Tokens a peer could pull from here."""
        return self.cpu_blocks * self.block_size_tokens if self.state.has_claim else 0


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A parsed request as the core sees it. `token_ids` is None where the prompt could not be
    tokenised exactly: such a request is routed by load and gets no match and no source. Its repr shows
    neither tokens nor salt."""

    request_id: str
    model: str = ""
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    lora_name: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    size_bytes: int = 0
    subset: frozenset[str] | None = None  # `ip` or `ip:port`; None: no hint given
    pieces: Sequence[int] | None = field(default=None, repr=False)  # stand-ins for tokens, 4 bytes each
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # those that plugins read

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) if self.token_ids is not None else 0

    @property
    def load_tokens(self) -> int:
        """Length of the prompt for counting load, where its tokens are not known: estimated."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return len(self.pieces) if self.pieces is not None else self.size_bytes // BYTES_PER_TOKEN


class Candidate(NamedTuple):
    """The one row every plugin sees. A tuple for the same reason as `PrefixMatch`."""

    endpoint: Endpoint
    metrics: EndpointMetrics = UNKNOWN_METRICS
    load: InflightLoad = NO_LOAD
    match: PrefixMatch = NO_MATCH  # as the engine reported it
    placed: PrefixMatch = NO_MATCH  # as placements suggest: what was sent there. Never a source.


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """Everything a decision may depend on besides the candidates; `rng` is seeded from the request
    id, so a recorded decision can be replayed."""

    request: SchedulingRequest
    now_s: float
    rng: random.Random
    peer: Endpoint | None = None  # the stage before picked it; None: this is the first stage
    outlook: Outlook | None = None  # what the request would meet where; None: nobody looks ahead


class SourceReason(enum.Enum):
    """Why a source was, or was not, named; also why one holder was passed over. Stable: these are
    metric labels and ledger values (docs/pulls.md)."""

    PULL = "pull"
    # nobody is asked
    NOT_CONFIGURED = "not_configured"  # no p2p-source-producer
    SWITCHED_OFF = "switched_off"  # thresholds say off
    NO_THRESHOLD = "no_threshold"  # neither a document nor the producer sets minCachedTokenDelta
    NO_TOKENS = "no_tokens"
    NO_CLAIM = "no_claim"  # no endpoint's cache state is known
    DESTINATION_UNKNOWN = "destination_unknown"
    NO_HOLDER = "no_holder"  # nobody has a servable block of this prompt
    # the sampled holder
    LOCAL_BEST = "local_best"  # is the computing endpoint itself
    BELOW_DELTA = "below_delta"
    NOT_CHEAPER = "not_cheaper"  # cost mode: pulling would take longer than computing
    # every holder was passed over; the reason is the deepest one's
    DRAINING = "draining"
    PEER_REFUSED = "peer_refused"  # the computing engine reports that the two refused each other
    UNVERIFIED = "unverified"  # requireVerified is set and one of the two reports no engine info
    INCOMPATIBLE = "incompatible"
    OVER_LIMIT = "over_limit"  # serves as many pulls as it may


@dataclass(frozen=True, slots=True)
class KvSource:
    """The peer to pull from. `gain_tokens` is what it out-caches the computing endpoint by."""

    endpoint: Endpoint
    servable_tokens: int
    gain_tokens: int
    verified: bool = False  # both engines report what they are, and agree


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """Outcome of the source rule: a source, or the reason for none, and what a replay needs.

    The tuples are cut to `MAX_RECORDED` entries: `considered` is the band of best holders with the
    weights that one of them was sampled by (the sampled one is always in it), `refused` are holders
    passed over, `holders` the deepest of all holders, refused or not, deepest first.
    """

    source: KvSource | None
    reason: SourceReason
    considered: tuple[tuple[EndpointId, int, float], ...] = ()  # (endpoint, servable tokens, weight)
    min_cached_token_delta: int | None = None  # in force for this decision
    generation: int = 0  # of the thresholds
    band_size: int = 0
    refused: tuple[tuple[EndpointId, SourceReason], ...] = ()
    holders: tuple[Candidate, ...] = ()
    holders_total: int = 0
    predicted: PullPrediction | None = None  # of the sampled holder, whatever decided
    by_cost: bool = False  # whether `predicted` decided, not the threshold


MAX_RECORDED = 8  # of many candidates, in a record


class ScoredCandidate(NamedTuple):
    """A candidate with its weighted sum and the parts of it, by plugin name."""

    candidate: Candidate
    score: float
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulingDecision:
    """The whole answer in one object."""

    decision_id: str
    request_id: str
    destination: Endpoint
    fallbacks: tuple[Endpoint, ...]
    prefill: Endpoint | None
    choice: SourceChoice
    scored: tuple[ScoredCandidate, ...]  # the best of the primary profile, best first
    computing: EndpointId  # where the prompt is computed: prefill endpoint, else destination
    computing_cached_tokens: int
    model: str = ""
    prompt_tokens: int | None = None  # None: not tokenised
    computed_by: Candidate | None = None  # the row behind `computing`, as the rule saw it
    refused_peers: frozenset[str] = frozenset()  # that the computing engine reported, as the rule saw it
    prefill_missing: bool = False  # it was to be split, and there was no prefill endpoint
    response_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # for the client
    forecasts: Mapping[EndpointId, Forecast] = field(default_factory=dict)  # of `scored`, where asked for
    primary_port: int | None = None  # where the gateway sends it; None: to the destination's own port

    @property
    def kv_source(self) -> Endpoint | None:
        return self.choice.source.endpoint if self.choice.source else None


PULL_MISSED = (
    "miss"  # reason of a pull whose source held nothing of it (`engine_plugin.transport.PullReason`)
)


@dataclass(frozen=True, slots=True)
class PullReport:
    """`PullFinished` of the computing engine: what it asked of `source` and what really came."""

    decision_id: str
    source: str  # p2p `ip:port`
    asked_tokens: int
    received_tokens: int
    received_bytes: int
    reason: str  # "ok", or why less came than was asked
    duration_ms: float


@dataclass(frozen=True, slots=True)
class OutputTiming:
    """How a streamed answer's output was spread: from its first piece to its last, and the gaps between
    pieces by the bounds in `GAP_BOUNDS_S` (counts, the last one without a bound)."""

    first_to_last_s: float
    gap_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as far as the gateway's stream shows it."""

    status: int | None = None
    served_by: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    completed: bool = False
    output: OutputTiming | None = None  # None: not streamed, or not readable
    streamed: bool = False  # an event stream, readable or not
    response_bytes: int = 0  # of body, as far as it was seen
