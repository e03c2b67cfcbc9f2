"""vLLM's secondary tier that pulls a named peer's blocks into the CPU tier and serves its own.

On the scheduler thread, where nothing here waits: questions and moves run on `PullService`'s thread, and
peers are served there without this thread. What vLLM's CPU tier holds is always right, whatever a peer does:
a block becomes readable only after it has arrived whole and its checksum was compared.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_plugin.transport import PrefetchResult, TierMemory
from engine_plugin.vllm import compat
from engine_plugin.vllm.engine_identity import (
    engine_identity,
    listen_address,
    new_instance,
    port_of,
    tier_tokens,
)
from engine_plugin.vllm.finished import Answered, Moved, Usable
from engine_plugin.vllm.guarded_policy import GuardedPolicy
from engine_plugin.vllm.ordered_pulls import OrderedPull, OrderSlots
from engine_plugin.vllm.pull_service import PullService
from engine_plugin.vllm.request_pull import Answer, RequestPull, Stage
from engine_plugin.vllm.supplies import Supplies
from engine_plugin.vllm.tier_config import TierConfig
from engine_plugin.vllm.tier_index import TierIndex
from engine_plugin.vllm.tier_metrics import TierMetrics, metric_definitions
from engine_plugin.vllm.transfer_params import parse_transfer_params

log = logging.getLogger("vllm.kvpull")

DRAIN_STEP_S = 0.002
_ANSWERS = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.LATER: LookupResult.RETRY,
}


class _Supply(str):
    """The kv_request_id of a prefill leg, kept in its request context."""


class PullTier(SecondaryTierManager):
    """Configured as an entry of `secondary_tiers`; `attach` is called by our offloading spec."""

    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str = "kvpull",
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Raises UnsupportedEngine, TierConfigError, TierMemoryError."""
        compat.check_engine()
        if backpressure_detector is not None:
            raise ValueError("kvpull tier: backpressure has no meaning here; remove it from this tier")
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        config = TierConfig.parse(settings)
        self._index = TierIndex()
        self._policy: GuardedPolicy | None = None
        self._primary: Any = None
        self._pulls: dict[str, RequestPull] = {}
        self._jobs: set[int] = set()
        self._orders: OrderSlots | None = None
        self._order_jobs = count(-1, -1)  # vLLM's own are not negative
        self._results: list[JobResult] = []
        self._figures_due = False
        self._wake: Callable[[], None] | None = None
        slots = offloading_spec.num_chunks
        instance = new_instance()
        region = compat.region_of(offloading_spec)
        self._tier = TierMemory(os.dup(region.fd), slots, self.block_size_bytes)
        self._service = PullService(
            config=config,
            listen=listen_address(offloading_spec, config),
            reports_port=port_of(config.reports_port, offloading_spec),
            index=self._index,
            tier=self._tier,
            find_identity=lambda: engine_identity(offloading_spec, config, self.block_size_bytes, instance),
            block_tokens=tier_tokens(offloading_spec),
            on_figures=self._tell_figures,
        )
        self._metrics = TierMetrics(config, self._service, self._index, slots)

    def attach(self, primary: Any, wake: Callable[[], None] | None = None) -> None:
        """Watch vLLM's CPU tier; before its first use. `wake` makes an idle engine take a step."""
        self._wake = wake
        self._primary = primary
        self._orders = OrderSlots(primary)
        self._policy = GuardedPolicy(compat.policy_of(primary), self._index)
        compat.replace_policy(primary, self._policy)

    # --- requests -------------------------------------------------------------------------------
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        params = parse_transfer_params(req_context.kv_transfer_params)
        source = params.source
        if params.malformed:
            self._metrics.ignored["malformed"] += 1
        if source is not None:
            pull = RequestPull(source, time.monotonic())
            if source.address == self._service.address:
                pull.end("self")
                self._service.report(pull)
            else:
                self._pulls[req_context.req_id] = pull
                req_context.set_state(pull)
        if params.supply_id is None:
            return RequestOffloadingContext()
        req_context.set_state(_Supply(params.supply_id))
        self._service.expect_supply(params.supply_id)
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        pull = req_context.get_state(RequestPull)
        return LookupResult.MISS if pull is None else _ANSWERS[pull.look_up(key)]

    def on_request_finished(self, req_context: ReqContext) -> None:
        pull = self._pulls.pop(req_context.req_id, None)
        if pull is not None and pull.stage is not Stage.DONE:
            offer = pull.abandon()
            if offer is not None:
                self._service.abandon(offer)
            self._service.report(pull)
        supply = req_context.get_state(_Supply)
        if supply is not None:
            self._service.supply_ready(supply)

    # --- jobs -----------------------------------------------------------------------------------
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Nothing is copied: peers read the CPU tier itself. A prefill leg's blocks are pinned there."""
        supply = job_metadata.req_context.get_state(_Supply)
        if supply is not None:
            self._index.pin(Supplies.lease_id(supply), job_metadata.keys)
        self._results.append(JobResult(job_id=job_metadata.job_id, success=True, transfer_bytes=0))

    def submit_load(self, job_metadata: TransferJob) -> None:
        pull = job_metadata.req_context.get_state(RequestPull)
        offer = None if pull is None else pull.take(list(job_metadata.keys))
        if pull is None or offer is None:
            self._results.append(JobResult(job_id=job_metadata.job_id, success=False))
            return
        self._jobs.add(job_metadata.job_id)
        slots = [int(slot) for slot in job_metadata.chunk_ids]
        self._service.fetch(job_metadata.job_id, pull, offer, slots)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def _collect(self) -> None:
        for finished in self._service.take_finished():
            match finished:
                case Answered():
                    self._answered(finished)
                case Moved():
                    self._moved(finished)
                case Usable(slots=slots):
                    self._give_back(slots)
                case OrderedPull():
                    self._begin_order(finished)

    def _answered(self, answered: Answered) -> None:
        pull, offer = answered.pull, answered.offer
        if pull.stage is not Stage.ASKING:  # the request has gone
            if offer is not None:
                self._service.abandon(offer)
        elif offer is not None:
            pull.offered(offer)
        else:
            pull.end(answered.reason)
            self._service.report(pull)

    def _moved(self, moved: Moved) -> None:
        pull, keys = moved.pull, list(moved.pull.keys)
        self._jobs.discard(moved.job_id)
        if moved.quarantined and self._policy is not None:
            self._policy.set_aside(keys, set(moved.quarantined))
        if isinstance(pull, OrderedPull):
            self._end_order(pull, moved)
            return
        if pull.stage is Stage.MOVING:
            pull.end(moved.reason, moved.blocks, moved.received_bytes)
            self._service.report(pull)
        self._results.append(
            JobResult(
                job_id=moved.job_id,
                success=moved.reason == "ok",
                successful_keys=keys[: moved.blocks],
                transfer_time=moved.seconds,
                transfer_bytes=moved.received_bytes,
            )
        )

    def _begin_order(self, pull: OrderedPull) -> None:
        offer, taken = pull.offer, "starting" if self._orders is None else self._orders.take(pull)
        if isinstance(taken, str):
            if offer is not None:
                self._service.abandon(offer)
            self._service.end_order(pull, PrefetchResult(0, 0, taken))
            return
        job_id = next(self._order_jobs)
        self._jobs.add(job_id)
        self._service.fetch(job_id, pull, *taken)

    def _end_order(self, pull: OrderedPull, moved: Moved) -> None:
        if self._orders is not None:
            self._orders.settle(pull, moved.blocks)
        self._service.end_order(pull, PrefetchResult(moved.blocks, moved.received_bytes, moved.reason))

    def _give_back(self, slots: Iterable[int]) -> None:
        if self._policy is None:
            return
        context = ReqContext(req_id="kvpull-quarantine")
        stand_ins = self._policy.give_back(slots, context)
        if stand_ins:
            self._primary.complete_store(stand_ins, context, False)

    # --- the step -------------------------------------------------------------------------------
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._figures_due = False  # this step tells them
        for pull in list(self._pulls.values()):
            if pull.wants_to_ask:
                self._service.ask(pull, pull.ask())
            elif (offer := pull.untaken_offer()) is not None:
                self._service.abandon(offer)
                self._service.report(pull)
        for req_id in context.new_req_ids:  # scheduled without a question: nothing was missing
            local = self._pulls.get(req_id)
            if local is not None and local.stage is Stage.COLLECTING:
                local.end("local")
                self._service.report(local)

    def has_pending_work(self) -> bool:
        """Peers are served without steps, and our own jobs keep vLLM stepping by being its jobs. One step
        tells new figures; an order needs one to begin and one to end."""
        return self._figures_due or bool(self._results) or self._service.has_finished()

    def _tell_figures(self) -> None:
        """On the service's thread."""
        if self._wake is not None:
            self._figures_due = True
            self._wake()

    def drain_jobs(self) -> None:
        """Until no fetch is under way and no peer can write into our slots: bounded by the pulls' deadlines
        and the quarantine's."""
        while self._jobs or self._service.quarantined_slots:
            self._collect()
            time.sleep(DRAIN_STEP_S)
        self._collect()

    def shutdown(self) -> None:
        self._service.close()
        self._tier.close()

    # --- metrics --------------------------------------------------------------------------------
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    def get_stats(self) -> Any:
        aside = self._policy.aside_blocks if self._policy is not None else 0
        return self._metrics.take(aside)
