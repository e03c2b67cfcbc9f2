"""A request on its way through a simulated fleet, and what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.prompts import Content
from simulator.tiers import SlotNumbers


@dataclass(slots=True)
class Record:
    """What is kept of a request. Times are virtual; None: it never came so far."""

    request_id: str
    tag: str
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""  # what its client calls the conversation; "": it does not say
    endpoint: str = ""  # destination
    computing: str = ""
    source: str = ""
    reason: str = ""  # of the source rule
    first_token_s: float | None = None
    ended_s: float | None = None
    failed: str = ""  # "", "timeout", "no_endpoint", "restart"
    device_hit_tokens: int = 0
    restored_tokens: int = 0
    pulled_tokens: int = 0
    pulled_bytes: float = 0.0
    pull_s: float = 0.0
    pull_end: str = ""  # how the pull ended
    computed_tokens: int = 0  # of the prompt
    preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def latency_s(self) -> float | None:
        return None if self.ended_s is None or self.failed else self.ended_s - self.sent_s


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One leg on one engine. `content` covers prompt and answer: what will be said is known before."""

    record: Record
    content: Content
    prompt_tokens: int
    output_tokens: int
    on_first_token: Callable[[EngineRequest], None]
    on_end: Callable[[EngineRequest, bool], None]  # True: complete
    on_pull_end: Callable[[EngineRequest, str, int, int], None] | None = None
    source: str | None = None  # name of the engine to pull from
    handed_over: bool = False  # the source is the prefill leg: no pull of the picker's
    ordered: bool = False  # a pull ahead of any request: nobody waits for it
    computed: int = 0  # tokens on the device
    generated: int = 0
    named_blocks: int = 0  # on the device
    slots: SlotNumbers = field(default_factory=lambda: array("i"))
    pending_parts: int = 0  # restore and pull that it waits for
    fetched_blocks: int = 0  # what they have brought
    gone: bool = False
    resumed: bool = False  # it was preempted after its first token
    ended: bool = False

    @property
    def left_tokens(self) -> int:
        """Answer tokens still to come."""
        return self.output_tokens - self.generated
