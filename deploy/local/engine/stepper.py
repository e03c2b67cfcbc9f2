"""One step of the engine: what its bytes are, and what follows once they are written.

`begin` reserves CPU slots for the write-through and describes the byte work; the core runs that in a
thread; `complete` names the blocks, logs the events and appends the next tokens. The answer is drawn from the
bytes read back, so wrong KV gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.local.engine.content import draw
from deploy.local.engine.counters import EngineCounters
from deploy.local.engine.events import EventLog
from deploy.local.engine.hashing import Block, BlockHasher
from deploy.local.engine.memory import Compute, Move
from deploy.local.engine.request import Request
from deploy.local.engine.scheduler import Portion
from engine_plugin import wire
from epp.engine_model.cache import PagedCache

_SHORTEST_ANSWER_TOKENS = 16
_ANSWER_SPREAD_TOKENS = 96
LONGEST_NATURAL_ANSWER_TOKENS = _SHORTEST_ANSWER_TOKENS + _ANSWER_SPREAD_TOKENS


@dataclass(frozen=True, slots=True)
class Work:
    """A portion with its byte work and the blocks that go to the CPU tier."""

    portion: Portion
    part: Compute
    offload: Sequence[Block]


class Stepper:
    """Owned by the engine's loop."""

    def __init__(
        self,
        *,
        cache: PagedCache,
        hasher: BlockHasher,
        events: EventLog,
        counters: EngineCounters,
        vocabulary: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._hasher = hasher
        self._events = events
        self._counters = counters
        self._vocabulary = vocabulary
        self._clock = clock

    def begin(self, portions: Sequence[Portion]) -> list[Work]:
        """Describe the byte work of a step."""
        planned: set[bytes] = set()
        return [self._begin(portion, planned) for portion in portions]

    def _begin(self, portion: Portion, planned: set[bytes]) -> Work:
        request = portion.request
        self._extend(request)
        blocks = self._to_offload(request, portion.stop, planned)
        allocation = self._cache.cpu.allocate(len(blocks))
        slots = allocation.slots if allocation else ()
        if allocation:
            self._events.removed(allocation.evicted, wire.MEDIUM_CPU)
        moves = [Move(request.slots[block.index], slot) for block, slot in zip(blocks, slots, strict=True)]
        sums = portion.stop >= request.prompt_tokens
        part = Compute(
            slots=request.slots,
            start=portion.start,
            stop=portion.stop,
            seeds=request.seeds.slice(portion.start, portion.stop),
            offload=moves,
            sum_from=request.summed if sums else None,
        )
        return Work(portion, part, blocks)

    def _extend(self, request: Request) -> None:
        """Seeds and names of the tokens that were appended since the last step."""
        request.seeds.extend(request.tokens[len(request.seeds) :])
        salt, lora_name = request.spec.salt, request.spec.lora_name
        self._hasher.extend(request.chain, request.tokens, salt=salt, lora_name=lora_name)

    def _to_offload(self, request: Request, stop: int, planned: set[bytes]) -> list[Block]:
        """Full blocks up to `stop` that the CPU tier lacks, as many as it has room for."""
        cpu = self._cache.cpu
        full = stop // self._hasher.block_size
        blocks: list[Block] = []
        for block in request.chain[request.offloaded : full]:
            if block.name not in cpu and block.name not in planned:
                blocks.append(block)
        request.offloaded = full
        self._counters.offload_skipped_blocks += max(0, len(blocks) - cpu.available)
        blocks = blocks[: cpu.available]
        planned.update(block.name for block in blocks)
        return blocks

    def complete(self, works: Sequence[Work], totals: Sequence[int]) -> None:
        """The bytes are there: name blocks, log events, append tokens."""
        for work in works:
            self._commit_device(work.portion)
            self._commit_cpu(work)
        for work, total in zip(works, totals, strict=True):
            self._advance(work, total)

    def _commit_device(self, portion: Portion) -> None:
        request, size = portion.request, self._hasher.block_size
        self.name_on_device(request, portion.start // size, portion.stop // size)

    def name_on_device(self, request: Request, first: int, last: int) -> None:
        """Blocks `[first, last)` of a request are complete on the device."""
        device, slots = self._cache.device, request.slots
        blocks = request.chain[first:last]
        named = [block for block in blocks if device.commit(slots[block.index], block.name)]
        self._events.device_stored(named)

    def _commit_cpu(self, work: Work) -> None:
        cpu = self._cache.cpu
        slots = [move.cpu_slot for move in work.part.offload]
        pairs = zip(work.offload, slots, strict=True)
        self._events.cpu_stored([block for block, slot in pairs if cpu.commit(slot, block.name)])
        cpu.unpin(slots)

    def _advance(self, work: Work, total: int) -> None:
        portion, request = work.portion, work.portion.request
        request.computed = portion.stop
        if portion.is_prefill:
            request.report.computed_tokens += portion.stop - portion.start
            self._counters.computed_prompt += portion.stop - portion.start
        if portion.stop < request.prompt_tokens:
            return
        request.total += total
        request.summed = portion.stop
        if request.report.output_tokens == 0:
            self._first_token(request)
        self._counters.generation += 1
        request.add_token(self._vocabulary[draw(request.total) % len(self._vocabulary)])

    def _first_token(self, request: Request) -> None:
        ttft_s = self._clock() - request.arrived_s
        request.report.ttft_ms = ttft_s * 1e3
        self._counters.observe_ttft(ttft_s)
        request.stop_after = request.spec.max_tokens
        if request.spec.stops_early:
            natural = _SHORTEST_ANSWER_TOKENS + draw(request.total + 1) % _ANSWER_SPREAD_TOKENS
            request.stop_after = min(natural, request.spec.max_tokens)
