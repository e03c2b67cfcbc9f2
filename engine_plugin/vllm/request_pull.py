"""One request's pull as the scheduler thread sees it: a small state machine without I/O or vLLM.

vLLM asks for one block at a time, several times over, and wants an answer at once: "look again later" while
a peer is being asked, then hit or miss. States, in order; every one can also end in DONE:

    COLLECTING  the first scan of the prompt names the missing blocks; each is answered "later"
    ASKING      the peer is being asked about all of them in one message
    OFFERED     the leading blocks are pinned at the peer and answered "hit": vLLM gives them slots
    MOVING      the peer writes into those slots
    DONE        whatever is not in the tier by now is a miss, and computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine_plugin.transport.types import Offer
from engine_plugin.vllm.transfer_params import Source


class Stage(Enum):
    """See the module."""

    COLLECTING = auto()
    ASKING = auto()
    OFFERED = auto()
    MOVING = auto()
    DONE = auto()


class Answer(Enum):
    """What vLLM is told about one block."""

    HIT = auto()
    MISS = auto()
    LATER = auto()


@dataclass(slots=True)
class PullOutcome:
    """What the report says in the end."""

    reason: str = "local"  # nobody had to be asked
    received_blocks: int = 0
    received_bytes: int = 0
    ended_s: float | None = None


@dataclass(slots=True, eq=False)
class RequestPull:
    """The pull of one request. `started_s`: when its source was first wanted."""

    source: Source
    started_s: float
    stage: Stage = Stage.COLLECTING
    keys: dict[bytes, int] = field(default_factory=dict)  # missing blocks -> place in the question
    offer: Offer | None = None
    seen_offer: bool = False  # vLLM has heard of a hit since the offer came
    outcome: PullOutcome = field(default_factory=PullOutcome)

    def look_up(self, key: bytes) -> Answer:
        """vLLM asks for one block that its own tiers lack."""
        if self.stage is Stage.COLLECTING:
            self.keys.setdefault(key, len(self.keys))
            return Answer.LATER
        if self.stage is Stage.ASKING:
            return Answer.LATER
        if self.stage is Stage.OFFERED and self.offer is not None:
            self.seen_offer = True
            place = self.keys.get(key)
            if place is not None and place < self.offer.hit_blocks:
                return Answer.HIT
        return Answer.MISS

    @property
    def wants_to_ask(self) -> bool:
        """The scan of the prompt is over and something is missing."""
        return self.stage is Stage.COLLECTING and bool(self.keys)

    def ask(self) -> tuple[bytes, ...]:
        """The question; from now on the answer is awaited."""
        self.stage = Stage.ASKING
        self.outcome.reason = "internal"  # until somebody says better
        return tuple(self.keys)

    def offered(self, offer: Offer) -> None:
        """The peer holds and has pinned the first `offer.hit_blocks` of the question."""
        self.stage, self.offer = Stage.OFFERED, offer

    def take(self, keys: Sequence[bytes]) -> Offer | None:
        """vLLM has slots for `keys`. The offer to fetch, or None if they are not its leading blocks."""
        offer = self.offer
        if self.stage is not Stage.OFFERED or offer is None or len(keys) > offer.hit_blocks:
            return None
        if any(self.keys.get(key) != place for place, key in enumerate(keys)):
            return None
        self.stage, self.offer = Stage.MOVING, None
        return offer

    def untaken_offer(self) -> Offer | None:
        """The offer that vLLM has heard of and found no slots for: to be given back, the pull is over."""
        if self.stage is not Stage.OFFERED or not self.seen_offer:
            return None
        offer, self.offer = self.offer, None
        self.end("no_slots")
        return offer

    def abandon(self) -> Offer | None:
        """The request has gone. An offer to give back, if there is one."""
        offer, self.offer = self.offer, None
        if self.stage is not Stage.DONE:
            self.end("local" if self.stage is Stage.COLLECTING else "aborted")
        return offer

    def end(self, reason: str, received_blocks: int = 0, received_bytes: int = 0) -> None:
        """Nothing more will come."""
        self.stage = Stage.DONE
        self.outcome.reason = reason
        self.outcome.received_blocks = received_blocks
        self.outcome.received_bytes = received_bytes
