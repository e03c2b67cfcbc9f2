"""The engine's loop: admit, fetch or restore, compute in steps, publish, release.

One asyncio task (`run`) owns all state; byte work runs in two threads, one for steps and one for
restores, and touches only slots reserved for it. A request is released in one place, whatever
ended it; slots are given back only when no thread and no peer can write into them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deploy.local.engine.content import SeedChain
from deploy.local.engine.counters import EngineCounters
from deploy.local.engine.events import EventLog, EventPublisher
from deploy.local.engine.hashing import Block, BlockHasher
from deploy.local.engine.kv_params import Address, Source
from deploy.local.engine.memory import KvMemory, Move
from deploy.local.engine.pulls import Puller
from deploy.local.engine.request import Request, RequestLog, Spec, State
from deploy.local.engine.scheduler import Portion, Scheduler
from deploy.local.engine.stepper import Stepper
from deploy.local.engine.store import CpuStore
from engine_plugin import wire
from epp.engine_model.cache import LocalPrefix, PagedCache
from epp.engine_model.timing import EngineTiming

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; `assembly` puts it together."""

    timing: EngineTiming
    time_scale: float  # real seconds per model second
    cache: PagedCache
    memory: KvMemory
    hasher: BlockHasher
    events: EventLog
    publisher: EventPublisher
    store: CpuStore
    puller: Puller
    scheduler: Scheduler
    stepper: Stepper
    counters: EngineCounters
    instance: str
    wake: asyncio.Event  # set whenever the loop has something new to look at


class Engine:
    """Takes requests, answers them token by token."""

    def __init__(self, parts: Parts, *, p2p_address: Address) -> None:
        self.parts = parts
        self.requests = RequestLog()
        self._p2p_address = p2p_address
        self._block_size = parts.hasher.block_size
        self._tasks: set[asyncio.Task[Any]] = set()
        self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="copy")

    # --- called by the API ----------------------------------------------------------------------
    async def submit(self, spec: Spec) -> Request:
        """Queue a request. Raises QueueFull."""
        arrived_s = asyncio.get_running_loop().time()
        chain, seeds = await asyncio.to_thread(self._names_and_seeds, spec)
        request = Request(spec, chain, seeds, arrived_s)
        request.supply_id = spec.transfer.supply_id
        if spec.transfer.answers_with_params:
            request.supply_id = request.supply_id or uuid.uuid4().hex
        source = spec.transfer.source
        if source is not None:
            request.report.source = "{}:{}".format(*source.address)
        request.report.kv_request_id = source.kv_request_id if source else request.supply_id
        self.parts.scheduler.submit(request)
        if request.supply_id is not None:
            self.parts.store.expect_supply(request.supply_id)
        self.requests.add(request.report)
        self.parts.wake.set()
        return request

    def abandon(self, request: Request) -> None:
        """The client has left; idempotent, harmless after the end."""
        if not request.finished:
            request.gone.set()
            self.parts.wake.set()

    def reset_prefix_cache(self, *, external: bool) -> None:
        """Forget the device tier's blocks and, if `external`, the CPU tier's. What is in use stays
        in use, without a name."""
        self.parts.cache.device.clear()
        if external:
            self.parts.cache.cpu.clear()
        self.parts.events.cleared(cpu_too=external)
        self.parts.wake.set()

    # --- life -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Serve until cancelled."""
        parts = self.parts
        try:
            while True:
                parts.wake.clear()
                for request in parts.scheduler.take_gone():
                    self._release(request, State.ABORTED)
                parts.scheduler.admit(self._start)
                portions = parts.scheduler.plan()
                parts.publisher.publish(parts.events.take())
                if portions:
                    await self._step(portions)
                else:
                    await parts.wake.wait()
        finally:
            for request in parts.scheduler.requests():
                request.finish(State.ABORTED)

    async def drain(self, deadline_s: float) -> bool:
        """Wait until no request is left; whether that came true in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self.parts.scheduler.idle:
                    await asyncio.gather(*(r.ended.wait() for r in self.parts.scheduler.requests()))
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """After `run` has ended and the transport has stopped: wait for threads and pulls."""
        for request in self.parts.scheduler.requests():
            request.gone.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)
        self._step_thread.shutdown(wait=True)
        self._copy_thread.shutdown(wait=True)
        self.parts.store.close()

    # --- admission ------------------------------------------------------------------------------
    def _names_and_seeds(self, spec: Spec) -> tuple[list[Block], SeedChain]:
        chain: list[Block] = []
        self.parts.hasher.extend(chain, spec.prompt, salt=spec.salt, lora_name=spec.lora_name)
        seeds = SeedChain()
        seeds.extend(spec.prompt)
        return chain, seeds

    def _start(self, request: Request) -> State | None:
        """Reserve device blocks, pin what is held; None: not enough room now."""
        cache, size = self.parts.cache, self._block_size
        reusable = request.chain[: request.reusable_blocks(size)]
        names = [block.name for block in reusable]
        local = cache.match(names)
        cache.device.pin(local.device_slots)
        allocation = cache.device.allocate(request.reserved_blocks(size) - len(local.device_slots))
        if allocation is None:
            cache.device.unpin(local.device_slots)
            return None
        self.parts.events.removed(allocation.evicted, wire.MEDIUM_DEVICE)
        cache.cpu.touch(names)
        cache.cpu.pin(local.cpu_slots)
        request.slots = [*local.device_slots, *allocation.slots]
        self._count_device_hits(request, len(local.device_slots))
        missing = reusable[local.blocks :]
        refused = self.parts.puller.refusal(request, len(missing))
        source = None if refused else request.spec.transfer.source
        if source is None and not local.cpu_slots:
            return State.RUNNING
        self._spawn(self._prepare(request, local, source, missing))
        return State.PREPARING

    def _count_device_hits(self, request: Request, blocks: int) -> None:
        counters = self.parts.counters
        request.computed = blocks * self._block_size
        request.report.device_hit_tokens = request.computed
        counters.prefix_queries += request.prompt_tokens
        counters.prefix_hits += request.computed
        counters.external_queries += request.prompt_tokens - request.computed
        counters.cached_by_source["device"] += request.computed

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what comes from elsewhere ----------------------------------------------------------------
    async def _prepare(
        self, request: Request, local: LocalPrefix, source: Source | None, missing: list[Block]
    ) -> None:
        """Pull, restore, then hand the request to the scheduler (or release it, if its client left)."""
        cpu_slots = local.cpu_slots
        try:
            if source is not None:
                cpu_slots += await self._pull(request, source, missing)
            if cpu_slots and not request.gone.is_set():
                await self._restore(request, len(local.device_slots), len(local.cpu_slots), cpu_slots)
        except Exception:  # a fault of our own costs time, not the request: the rest is computed
            log.exception("request %s: preparing failed", request.spec.request_id)
        finally:
            self.parts.cache.cpu.unpin(cpu_slots)
        if request.gone.is_set():
            self.parts.scheduler.drop(request)
            self._release(request, State.ABORTED)
        else:
            self.parts.scheduler.prepared(request)
        self.parts.wake.set()

    async def _pull(self, request: Request, source: Source, missing: list[Block]) -> tuple[int, ...]:
        """Slots of what a peer gave; returns early if the client leaves (the pull then ends alone)."""
        cached_tokens = request.prompt_tokens - len(missing) * self._block_size
        first = 0 if source.supply_wait else cached_tokens
        recompute_ms = self.parts.timing.recompute_ms(request.prompt_tokens, first)
        recompute_s = recompute_ms * 1e-3 * self.parts.time_scale
        pull = self._spawn(self.parts.puller.pull(request, source, missing, recompute_s))
        left = asyncio.ensure_future(request.gone.wait())
        try:
            await asyncio.wait({pull, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        slots: tuple[int, ...] = pull.result() if pull.done() else ()
        return slots

    async def _restore(
        self, request: Request, first: int, local_blocks: int, cpu_slots: tuple[int, ...]
    ) -> None:
        """Copy CPU blocks to the device, verify them, keep the leading ones that are right."""
        size, count = self._block_size, len(cpu_slots)
        moves = [Move(request.slots[first + i], slot) for i, slot in enumerate(cpu_slots)]
        seeds = request.seeds.slice(first * size, (first + count) * size)
        loop = asyncio.get_running_loop()
        good = await loop.run_in_executor(self._copy_thread, self.parts.memory.restore, moves, seeds)
        self.parts.stepper.name_on_device(request, first, first + good)
        request.computed = (first + good) * size
        self._count_restored(request, min(good, local_blocks), max(0, good - local_blocks))
        if good < count:
            self._drop_corrupt(request, first + good, cpu_slots[good])

    def _count_restored(self, request: Request, own_blocks: int, peer_blocks: int) -> None:
        report, counters, size = request.report, self.parts.counters, self._block_size
        report.restored_tokens = own_blocks * size
        report.pulled_tokens = min(report.pulled_tokens, peer_blocks * size)
        report.handed_over_tokens = min(report.handed_over_tokens, peer_blocks * size)
        counters.external_hits += (own_blocks + peer_blocks) * size
        counters.cached_by_source["host"] += own_blocks * size
        counters.cached_by_source["p2p"] += peer_blocks * size

    def _drop_corrupt(self, request: Request, index: int, cpu_slot: int) -> None:
        """A block's bytes are not what its tokens say: nobody may get it again."""
        cpu, name = self.parts.cache.cpu, request.chain[index].name
        request.report.corrupt_blocks += 1
        self.parts.counters.corrupt_blocks += 1
        log.error("request %s: block %d in CPU slot %d is corrupt", request.spec.request_id, index, cpu_slot)
        if cpu.find(name) == cpu_slot:
            cpu.forget(name)
            self.parts.events.removed([name], wire.MEDIUM_CPU)

    # --- computing --------------------------------------------------------------------------------
    async def _step(self, portions: list[Portion]) -> None:
        """One step: the bytes in a thread, the rest of the model's time asleep."""
        parts, loop = self.parts, asyncio.get_running_loop()
        ends_s = loop.time() + parts.scheduler.step_ms(portions) * 1e-3 * parts.time_scale
        works = parts.stepper.begin(portions)
        compute = [work.part for work in works]
        totals = await loop.run_in_executor(self._step_thread, parts.memory.step, compute)
        await asyncio.sleep(max(0.0, ends_s - loop.time()))
        parts.stepper.complete(works, totals)
        for portion in portions:
            self._after_step(portion.request)

    def _after_step(self, request: Request) -> None:
        if request.supply_id is not None and request.prefilled and not request.supplied:
            self._hand_off(request, request.supply_id)
        if request.report.output_tokens >= request.stop_after > 0:
            self.parts.scheduler.drop(request)
            self._release(request, State.FINISHED)

    def _hand_off(self, request: Request, supply_id: str) -> None:
        """Prefill leg: the prompt's full blocks wait for the decode leg."""
        full = request.prompt_tokens // self._block_size
        slots = self.parts.cache.cpu.prefix([block.name for block in request.chain[:full]])
        request.supplied = True
        request.report.supplied_tokens = len(slots) * self._block_size
        if slots:
            self.parts.store.announce(supply_id, slots)
        else:
            self.parts.store.fail_supply(supply_id)
        if request.spec.transfer.answers_with_params:
            host, port = self._p2p_address
            request.kv_response = {
                wire.DO_REMOTE_PREFILL: True,
                wire.DO_REMOTE_DECODE: False,
                wire.REMOTE_ENGINE_ID: self.parts.instance,
                wire.REMOTE_BLOCK_IDS: list(slots),
                **wire.kv_source_params(supply_id, host, port),
            }

    def _release(self, request: Request, state: State) -> None:
        """The one end of every request."""
        self.parts.cache.device.unpin(request.slots)
        request.slots = []
        if request.supply_id is not None and not request.supplied:
            self.parts.store.fail_supply(request.supply_id)
        short = request.stop_after < request.spec.max_tokens
        reason = "abort" if state is State.ABORTED else ("stop" if short else "length")
        self.parts.counters.finished_requests[reason] += 1
        request.finish_reason = reason
        request.finish(state)
