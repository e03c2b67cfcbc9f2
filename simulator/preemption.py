"""Preemption: answers take device blocks as they grow; where none is left the youngest request starts over.

Semantics: vLLM V1, preemption by recomputation: the victim's blocks stay in the cache until reused, it
goes to the head of the queue, and nothing new is admitted in that step.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from epp.core.types import CacheTier
from simulator.event_log import EventLog
from simulator.requests import EngineRequest
from simulator.tiers import NO_SLOTS, EngineTiers


class Preemptive(Protocol):
    """What of an engine changes here."""

    cache: EngineTiers
    events: EventLog
    queue: deque[EngineRequest]
    batch: list[EngineRequest]

    def release(self, request: EngineRequest, complete: bool) -> None: ...


def grow(engine: Preemptive) -> bool:
    """Mutates: every answer gets the block that its next token needs. True: somebody lost its own for it."""
    preempted = False
    for request in list(engine.batch):
        while (
            request in engine.batch and request.computed >= len(request.slots) * request.content.block_tokens
        ):
            allocated = engine.cache.device.allocate(1)
            if allocated is not None:
                slots, evicted = allocated
                engine.events.removed(CacheTier.DEVICE, evicted)
                request.slots = request.slots + slots
                continue
            preempted = True
            victim = engine.batch.pop()
            if engine.batch:
                _start_over(engine, victim)
            else:  # alone, and still too large: it can never end
                engine.release(victim, complete=False)
    return preempted


def _start_over(engine: Preemptive, victim: EngineRequest) -> None:
    """What it has said is part of its prompt from now on."""
    engine.cache.device.unpin(victim.slots)
    victim.slots = NO_SLOTS
    victim.resumed = victim.resumed or victim.generated > 0
    victim.prompt_tokens += victim.generated
    victim.output_tokens -= victim.generated
    victim.generated = victim.computed = victim.named_blocks = victim.fetched_blocks = 0
    victim.source = None
    victim.record.preemptions += 1
    engine.queue.appendleft(victim)
