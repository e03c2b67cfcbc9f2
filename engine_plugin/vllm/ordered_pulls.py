"""Pulls that a peer has ordered ("pull these blocks now") and that no request waits for.

An order is looked up and moved on the transport's loop like any pull. Its slots are vLLM's, so in between it
needs the scheduler thread once to get them and once to say that they are filled; an idle engine is asked for
those steps. What vLLM's CPU tier holds afterwards is as if a request had brought it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

from vllm.v1.kv_offload.base import ReqContext

from engine_plugin.identity import Address
from engine_plugin.transport import Offer, PrefetchOrder, PrefetchResult, PullError
from engine_plugin.vllm.request_pull import RequestPull, Stage
from engine_plugin.vllm.tier_index import TierIndex
from engine_plugin.vllm.transfer_params import Source

OK: Final = "ok"


class LookUp(Protocol):
    """`PeerTransport.lookup`."""

    async def __call__(
        self, source: Address, kv_request_id: str, hashes: tuple[bytes, ...], *, deadline_s: float
    ) -> Offer: ...


@dataclass(slots=True, eq=False)
class OrderedPull(RequestPull):
    """An order's pull. `ended`: on the transport's loop. `context`: vLLM's, once there are slots."""

    ended: asyncio.Future[PrefetchResult] = field(kw_only=True)
    context: Any = None


async def serve_order(
    order: PrefetchOrder, look_up: LookUp, index: TierIndex, hand_over: Callable[[OrderedPull], None]
) -> PrefetchResult:
    """Pull what is missing of an order; on the transport's loop. `hand_over` gives the offer to the scheduler
    thread. The caller bounds the wait; what is under way when it gives up is finished all the same."""
    held = index.held_prefix(order.hashes)
    missing = order.hashes[held:]
    if not missing:
        return PrefetchResult(held, 0)
    loop = asyncio.get_running_loop()
    pull = OrderedPull(
        Source(order.kv_request_id, order.source, handed_over=False), loop.time(), ended=loop.create_future()
    )
    try:
        offer = await look_up(order.source, order.kv_request_id, missing, deadline_s=order.deadline_s)
    except PullError as error:
        return PrefetchResult(held, 0, error.reason.value)
    pull.keys = {key: place for place, key in enumerate(missing[: offer.hit_blocks])}
    pull.offered(offer)
    hand_over(pull)
    ended = await pull.ended
    return PrefetchResult(held + ended.blocks, ended.received_bytes, ended.reason)


class OrderSlots:
    """vLLM's side of orders: slots of the CPU tier, and what becomes of them. On the scheduler thread."""

    def __init__(self, primary: Any) -> None:
        self._primary = primary
        self._numbers = count(1)

    def take(self, pull: OrderedPull) -> tuple[Offer, list[int]] | str:
        """Slots for the leading blocks of an offer that are still missing, or why there are none."""
        offer, pull.offer = pull.offer, None
        if offer is None or pull.ended.cancelled():
            return "aborted"
        pull.context = ReqContext(req_id=f"kvpull-order-{next(self._numbers)}")
        keys = list(pull.keys)
        for place, key in enumerate(keys):
            pull.context.set_offload_key_position(key, place)
        prepared = self._primary.prepare_store(keys, pull.context)
        if prepared is None:
            return "no_slots"
        taken = list(prepared.keys_to_store)
        leading = next((at for at, key in enumerate(taken) if key != keys[at]), len(taken))
        if leading < len(taken):  # a request has brought some of them meanwhile
            self._primary.complete_store(taken[leading:], pull.context, False)
        if not leading:
            return "local"
        pull.keys = {key: place for place, key in enumerate(keys[:leading])}
        pull.stage = Stage.MOVING
        return offer, [int(slot) for slot in prepared.store_spec.chunk_ids[:leading]]

    def settle(self, pull: OrderedPull, blocks: int) -> None:
        """The first `blocks` of its slots are filled, the others are not; those in quarantine have been set
        aside before."""
        keys = list(pull.keys)
        if blocks:
            self._primary.complete_store(keys[:blocks], pull.context, True)
        if blocks < len(keys):
            self._primary.complete_store(keys[blocks:], pull.context, False)
        self._primary.on_request_finished(pull.context)
