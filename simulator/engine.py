"""One modelled engine in virtual time: admit, restore or pull, compute in steps, publish, release.

Semantics: the emulated engine of the local fleet (`deploy.local.engine`), whose steps, timing and cache
bookkeeping are the same code (`epp.engine_model`); admission as in vLLM: nothing starts behind a step that is
full. When steps begin and end is the `Stepper`'s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from epp.core.packed_events import PackedBatch
from epp.core.types import CacheTier
from epp.engine_model.batching import Portion, has_budget_left, plan_step
from epp.engine_model.profile import ModelProfile
from epp.engine_model.timing import PrefillChunk
from simulator.event_log import EventLog
from simulator.preemption import grow
from simulator.requests import EngineRequest
from simulator.steps import Stepper
from simulator.tiers import NO_SLOTS, EngineTiers, SlotNumbers
from simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes of one engine."""

    block_tokens: int = 64
    device_tokens: int = 1_220_000
    cpu_tokens: int = 2_220_000
    max_running: int = 256
    admits_ahead: bool = False  # True: as the emulated engine, whatever the step's budget
    preempts: bool = False  # True: answers reserve nothing; where the device is full the youngest starts over


class SimulatedEngine:
    """Owned by one fleet; every method is called at the timeline's now."""

    def __init__(
        self,
        name: str,
        shape: EngineShape,
        profile: ModelProfile,
        timeline: Timeline,
        pull: Callable[[EngineRequest, int], None],
        publish: Callable[[PackedBatch], None],
        stepper: Stepper | None = None,
    ) -> None:
        """`pull(request, blocks_here)` fetches what follows `blocks_here` and then calls `part_has_come`.
        Engines that are given the same `stepper` are ranks of one instance."""
        self.name = name
        self.shape = shape
        self.profile = profile
        self.cache = EngineTiers.empty(
            max(1, shape.device_tokens // shape.block_tokens), max(1, shape.cpu_tokens // shape.block_tokens)
        )
        self.alive = True
        self.busy_s = 0.0
        self.computed_tokens = 0
        self._timeline = timeline
        self._pull = pull
        self.events = EventLog(shape.block_tokens, publish)
        self.queue: deque[EngineRequest] = deque()
        self._preparing: list[EngineRequest] = []
        self.batch: list[EngineRequest] = []
        self._restores_until_s = 0.0
        self._stepper = stepper or Stepper(timeline)
        self._stepper.join(self)

    # --- what a scrape shows ---------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self._preparing)

    @property
    def running(self) -> int:
        return len(self.batch)

    @property
    def kv_usage(self) -> float:
        return self.cache.device.in_use / self.cache.device.slots

    # --- requests ---------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        self.queue.append(request)
        self._stepper.wake()

    def abandon(self, request: EngineRequest) -> None:
        """The client has left; idempotent. A request whose KV is on its way ends when that has ended."""
        if request.ended or request.gone:
            return
        request.gone = True
        if request in self.queue:
            self.queue.remove(request)
            self.release(request, complete=False)
        self._stepper.wake()

    def lose_everything(self) -> None:
        """The process dies: requests fail, caches are gone."""
        self._stepper.drop(self)
        for request in [*self.queue, *self._preparing, *self.batch]:
            self._end(request, complete=False)
        self.queue.clear()
        self._preparing.clear()
        self.batch.clear()
        self.events.clear()
        self.cache = EngineTiers.empty(self.cache.device.slots, self.cache.cpu.slots)

    # --- admission --------------------------------------------------------------------------------
    def _admit(self) -> None:
        shape = self.shape
        while self.queue and len(self.batch) + len(self._preparing) < shape.max_running:
            budget = self.profile.timing.chunk_tokens
            if not shape.admits_ahead and not has_budget_left(self.batch, budget):
                return
            if not self._start(self.queue[0]):
                return
            self.queue.popleft()

    def _start(self, request: EngineRequest) -> bool:
        """Reserve device blocks and pin what is held; False: not enough room now."""
        size, cache = self.shape.block_tokens, self.cache
        names = request.content.names[: (request.prompt_tokens - 1) // size]  # one token is always computed
        on_device, in_cpu = cache.match(names)
        cache.device.pin(on_device)
        # the last token of an answer is never computed
        answer = 0 if self.shape.preempts else request.output_tokens - 1
        reserved = math.ceil((request.prompt_tokens + answer) / size)
        allocated = cache.device.allocate(reserved - len(on_device))
        if allocated is None:
            cache.device.unpin(on_device)
            return False
        slots, evicted = allocated
        self.events.removed(CacheTier.DEVICE, evicted)
        cache.cpu.touch(names)
        request.slots = on_device + slots
        request.named_blocks = len(on_device)
        request.computed = request.named_blocks * size
        request.record.device_hit_tokens += request.computed
        cache.cpu.pin(in_cpu)
        wants_pull = request.source is not None and len(on_device) + len(in_cpu) < len(names)
        request.pending_parts = wants_pull + bool(in_cpu)
        if not request.pending_parts:
            self.batch.append(request)
            return True
        self._preparing.append(request)
        if in_cpu:
            self._restore(request, in_cpu)
        if wants_pull:
            self._pull(request, len(on_device) + len(in_cpu))
        return True

    def _restore(self, request: EngineRequest, cpu_slots: SlotNumbers) -> None:
        """Copy own CPU blocks to the device, one request's after the other's."""
        transfer, pool = self.profile.transfer, self.cache.cpu
        tokens = len(cpu_slots) * self.shape.block_tokens
        link_s = tokens * self.profile.kv_bytes_per_token / transfer.restore_bytes_per_s
        begin_s = max(self._timeline.now_s, self._restores_until_s)
        self._restores_until_s = begin_s + link_s

        def restored() -> None:
            if self.cache.cpu is not pool:
                return  # the engine died meanwhile
            pool.unpin(cpu_slots)
            request.record.restored_tokens += tokens
            self.part_has_come(request, len(cpu_slots))

        self._timeline.at(begin_s + link_s + transfer.restore_floor_s, restored)

    def part_has_come(self, request: EngineRequest, blocks: int) -> None:
        """A restore or a pull has ended and brought so many blocks. After the last part the rest is computed;
        nothing that is missing can hold a request up."""
        request.fetched_blocks += blocks
        request.pending_parts -= 1
        if request.pending_parts or request.ended:
            return
        self._preparing.remove(request)
        if request.gone:
            self.release(request, complete=False)
        else:
            self.name_on_device(request, request.named_blocks + request.fetched_blocks)
            request.computed = request.named_blocks * self.shape.block_tokens
            self.batch.append(request)
        self.events.flush()
        self._stepper.wake()

    # --- blocks -------------------------------------------------------------------------------------
    def name_on_device(self, request: EngineRequest, until_block: int) -> None:
        """Blocks up to `until_block` of a request are complete on the device."""
        first = request.named_blocks
        names, slots = request.content.names[first:until_block], request.slots[first:until_block]
        fresh = self.cache.device.commit_all(slots, names)
        request.named_blocks = max(first, until_block)
        self.events.stored(CacheTier.DEVICE, request.content, first, fresh)

    def store_in_cpu(self, request: EngineRequest, first: int, until_block: int) -> int:
        """Write blocks of a request through to the CPU tier, as far as there is room; how many are new."""
        fresh, evicted = self.cache.cpu.store(request.content.names[first:until_block])
        self.events.removed(CacheTier.CPU, evicted)
        self.events.stored(CacheTier.CPU, request.content, first, fresh)
        return sum(fresh)

    def pulled(self, request: EngineRequest, first: int, fresh: bytes) -> None:
        """Blocks from `first` on have come from a peer into the CPU tier."""
        self.events.stored(CacheTier.CPU, request.content, first, fresh)

    # --- steps --------------------------------------------------------------------------------------
    def _run_s(self, portions: list[Portion[EngineRequest]], count: int) -> float:
        """Duration of `count` decode steps in a row: contexts grow by a token each."""
        timing, sequences = self.profile.timing, len(portions)
        context = sum([p.start for p in portions])
        grown = sequences * count * (count - 1) / 2
        each_ms = timing.decode_fixed_ms(sequences)
        return 1e-3 * (count * each_ms + timing.decode_context_ns * 1e-6 * (count * context + grown))

    def plan(self) -> list[Portion[EngineRequest]]:
        """Mutates: end what has been abandoned and admit what fits; what the next step computes here."""
        if not self.alive:
            return []
        for request in [r for r in self.batch if r.gone]:
            self.batch.remove(request)
            self.release(request, complete=False)
        if not (self.shape.preempts and grow(self) and self.batch):
            self._admit()
        self.events.flush()
        return list(plan_step(self.batch, self.profile.timing.chunk_tokens))

    def steps_ahead(self, request: EngineRequest) -> int:
        """Decode steps until its answer ends, or needs a block that is not reserved."""
        if not self.shape.preempts:
            return request.left_tokens
        return min(request.left_tokens, len(request.slots) * self.shape.block_tokens - request.computed)

    def step_s(self, portions: list[Portion[EngineRequest]], count: int = 1) -> float:
        """Duration of a step, or of `count` decode steps in a row."""
        if not any(p.is_prefill for p in portions):
            return self._run_s(portions, count)
        prefills = [PrefillChunk(p.stop - p.start, p.start) for p in portions if p.is_prefill]
        contexts = [p.start for p in portions if not p.is_prefill]
        return self.profile.timing.step_ms(prefills, contexts) * 1e-3

    def share_s(self, tokens: float) -> float:
        """Time for this device's share of the experts of other ranks' prefilled tokens."""
        return tokens * self.profile.timing.shared_token_us * 1e-6

    def complete(self, portions: list[Portion[EngineRequest]], count: int, took_s: float) -> None:
        """Mutates: `count` steps of these portions are computed."""
        self.busy_s += took_s
        finished = [portion.request for portion in portions if self._advance(portion, count)]
        self.events.flush()
        for request in finished:
            self.batch.remove(request)
            self.release(request, complete=True)

    def _advance(self, portion: Portion[EngineRequest], count: int) -> bool:
        """The portion is computed; whether the request is complete."""
        request, size = portion.request, self.shape.block_tokens
        stop = portion.stop if portion.is_prefill else portion.start + count
        if portion.is_prefill:
            request.record.computed_tokens += stop - portion.start
            self.computed_tokens += stop - portion.start
        request.computed = stop
        full = min(stop // size, len(request.content.names))
        if full > request.named_blocks:
            first = request.named_blocks
            self.name_on_device(request, full)
            self.store_in_cpu(request, first, full)
        if stop < request.prompt_tokens:
            return False
        if request.generated == 0:
            request.generated = 1
            if not request.gone and not request.resumed:
                request.on_first_token(request)
        else:
            request.generated += count
        return request.generated >= request.output_tokens

    def release(self, request: EngineRequest, complete: bool) -> None:
        """The one end of every request."""
        self.cache.device.unpin(request.slots)
        self._end(request, complete and not request.gone)

    def _end(self, request: EngineRequest, complete: bool) -> None:
        request.slots = NO_SLOTS
        request.ended = True
        request.on_end(request, complete)
