"""What the gatherers found out: values only. None stands for "could not be learned", never for "zero"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Listed:
    """One endpoint as a picker sees it (`/debug/kvpull/endpoints`)."""

    name: str  # pod/rank
    address: str  # ip:port of the serving port
    host: str
    state: str
    p2p_address: str
    events_port: int | None
    replay_port: int | None
    waiting_known: bool
    metrics_age_s: float | None
    block_size_tokens: int | None
    cpu_blocks: int
    info: Mapping[str, str] | None  # what engines compare; None: reports nothing
    differs_from_pool: bool
    hashes_unlike: str | None
    events: Mapping[str, int]
    refused_peers: tuple[str, ...] = ()
    draining: bool = False

    @property
    def has_claim(self) -> bool:
        """Whether the picker can know what it holds."""
        return self.state in ("live", "partial")


@dataclass(frozen=True, slots=True)
class PickerFacts:
    """One replica of the picker."""

    url: str
    fault: str | None = None
    endpoints: tuple[Listed, ...] = ()
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    pull_decisions: float | None = None
    # endpoint -> kind of event message -> count
    messages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    clock_offset_s: float | None = None  # against the doctor's clock


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine, asked at its serving address (through the sidecar, where there is one)."""

    fault: str | None = None  # why its /metrics could not be read
    info_labels: tuple[str, ...] | None = None  # names of kvpull_engine_info's labels; None: no such metric
    info: Mapping[str, str] = field(default_factory=dict)
    metric_names: frozenset[str] = frozenset()
    # "p2p", "events", "replay" -> why no connection came about
    closed: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    clock_offset_s: float | None = None
    sidecar_offset_s: float | None = None
    sidecar_fault: str | None = None
    # reason -> routing headers not followed, since its start
    sidecar_drops: Mapping[str, float] = field(default_factory=dict)
    sidecar_pulls: float | None = None  # legs sent with a source; None: its metrics are not known


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """One probe text, tokenised twice. `form` is the API."""

    picker: str
    endpoint: str
    form: str
    engine_count: int | None
    picker_count: int | None
    equal: bool
    fault: str | None = None  # why the two could not be compared
    picker_fault: bool = False  # it is the picker that cannot


@dataclass(frozen=True, slots=True)
class RepeatFacts:
    """A prompt sent twice through the gateway."""

    gateway: str
    fault: str | None = None
    taken: bool = False  # the gateway took the request: the fault may be the endpoint's that it went to
    prompt_tokens: int | None = None
    best_cached_tokens: int = 0  # of the repetition, over all candidates
    reason: str = ""
    computing: str = ""  # who computed it first
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class PullFacts:
    """A request sent to `destination` with `source`, which had just computed its prompt, named in the header.

    Counters are rises over that one request, of the whole process: other traffic may add to them.
    """

    source: str
    destination: str
    fault: str | None = None
    primed: bool = True  # the picker heard that the source holds it
    sidecar_pulls: float | None = None
    sidecar_drops: Mapping[str, float] = field(default_factory=dict)
    engine_pulls: Mapping[str, float] | None = None  # by reason; None: no such counter
    received_bytes: float | None = None
    served_bytes: float | None = None
    external_tokens: float | None = None  # vLLM's own count of tokens from a connector
    prompt_tokens: int | None = None

    @property
    def pair(self) -> frozenset[str]:
        return frozenset((self.source, self.destination))


@dataclass(frozen=True, slots=True)
class ShmFacts:
    """/dev/shm of the machine (or pod) that the doctor runs in."""

    path: str
    size_bytes: int
    free_bytes: int
    stale: tuple[str, ...] = ()  # names of left-over tier files that no process has mapped


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. `endpoints` is the first answering picker's list."""

    pickers: tuple[PickerFacts, ...]
    engines: Mapping[str, EngineFacts] = field(default_factory=dict)
    tokens: tuple[TokenFacts, ...] = ()
    repeat: RepeatFacts | None = None
    pulls: tuple[PullFacts, ...] = ()
    shm: ShmFacts | None = None
    probed: bool = True

    @property
    def endpoints(self) -> tuple[Listed, ...]:
        return next((p.endpoints for p in self.pickers if p.fault is None), ())
