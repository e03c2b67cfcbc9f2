"""What the transport's thread tells the scheduler's: pulls that ended, slots that came free, counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine_plugin.transport import Offer
from engine_plugin.vllm.ordered_pulls import OrderedPull
from engine_plugin.vllm.request_pull import RequestPull


@dataclass(frozen=True, slots=True)
class Answered:
    """A source has answered; `offer` None: with nothing, for `reason`."""

    pull: RequestPull
    offer: Offer | None
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A fetch is over: the first `blocks` of its slots are usable, `quarantined` must not be reused."""

    job_id: int
    pull: RequestPull
    blocks: int
    received_bytes: int
    reason: str
    quarantined: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Usable:
    """These slots' quarantine is over."""

    slots: tuple[int, ...]


Finished = Answered | Moved | Usable | OrderedPull


@dataclass(slots=True)
class ServiceCounts:
    """What the transport does not count itself. Written on the service's thread only."""

    reports: Counter[str] = field(default_factory=Counter)  # PullFinished by reason
    received_tokens: int = 0
    orders: Counter[str] = field(default_factory=Counter)  # prefetch orders by what came of them
