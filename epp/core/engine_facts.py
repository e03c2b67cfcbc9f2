"""What is known of an engine: how far its cache can be spoken for, what it says of itself, its last scrape.

`None` in a metric means *unknown* (never scraped, stale, NaN or absent) and is neither idle nor full; what
it counts as is `epp.plugins.unknown`.
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass, field, replace


class ClaimState(enum.Enum):
    """How far the index may speak for an endpoint."""

    UNKNOWN = "unknown"  # nothing heard: no claim
    SYNCING = "syncing"  # replay asked for: no claim
    PARTIAL = "partial"  # the replay buffer had wrapped: a sound lower bound
    LIVE = "live"  # exact, as the engine reported it
    UNSUPPORTED = "unsupported"  # heard, but a cache group of the model has no rule: no claim
    has_claim: bool

    def __init__(self, value: str) -> None:
        self.has_claim = value in ("partial", "live")  # a plain attribute: read a thousand times a decision


# what two engines must agree on; the tensor-parallel layout is part of `layout_fp`
_COMPARED = ("protocol", "block_size_tokens", "hash_algo", "seed_fp", "model_fp", "layout_fp")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine with our plugin says of itself (`kvpull_engine_info`). The seed and the model
    appear as fingerprints only."""

    instance: str
    block_size_tokens: int
    hash_algo: str
    seed_fp: str
    model_fp: str
    layout_fp: str
    protocol: str
    p2p_addr: str = ""
    pull_key: str = field(init=False, compare=False, repr=False, default="")  # equal: may pull

    def __post_init__(self) -> None:
        compared = (str(getattr(self, name)) for name in _COMPARED)
        object.__setattr__(self, "pull_key", sys.intern("\n".join(compared)))

    def mismatch(self, other: EngineInfo) -> str | None:
        """Name of the first field that makes a pull between the two impossible, or None."""
        if self.pull_key == other.pull_key:
            return None
        for name in _COMPARED:
            if getattr(self, name) != getattr(other, name):
                return name.removesuffix("_tokens")
        return None


@dataclass(frozen=True, slots=True)
class LoraState:
    """LoRA adapters of an engine: in use, waiting for a place, and how many places there are."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    max_loras: int = 0

    @property
    def has_room(self) -> bool:
        return len(self.running) + len(self.waiting) < self.max_loras


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """Last scrape of an engine. `scraped_at_s` is on the core's clock; None: never scraped."""

    scraped_at_s: float | None = None
    waiting_requests: float | None = None
    running_requests: float | None = None
    kv_usage: float | None = None  # 0..1 of the device tier
    block_size_tokens: int | None = None
    info: EngineInfo | None = None  # None: engine without our plugin, `unverified`
    model_name: str | None = None  # the base model, under the first name it is served by
    asleep: bool | None = None  # its cache is discarded while it sleeps; None: it does not say
    loras: LoraState | None = None  # None: the page does not say
    cache_tokens: int | None = None  # that its device cache can hold; None: the page does not say

    def fresh(self, now_s: float, max_age_s: float) -> bool:
        return self.scraped_at_s is not None and now_s - self.scraped_at_s <= max_age_s

    def without_nonsense(self) -> EndpointMetrics:
        """Itself where every figure is a finite, non-negative number or None."""
        figures = (self.waiting_requests, self.running_requests, self.kv_usage)
        known = [f if f is not None and math.isfinite(f) and f >= 0.0 else None for f in figures]
        if tuple(known) == figures:
            return self
        waiting, running, usage = known
        return replace(self, waiting_requests=waiting, running_requests=running, kv_usage=usage)


UNKNOWN_METRICS = EndpointMetrics()
