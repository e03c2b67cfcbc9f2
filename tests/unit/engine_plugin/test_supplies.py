"""P/D hand-over: a look-up waits for the prefill leg, and pins end with the fetch or their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine_plugin.vllm.supplies import Supplies
from engine_plugin.vllm.tier_index import TierIndex
from engine_plugin.vllm.tier_store import TierStore

KEYS = [bytes([number]) * 4 for number in range(4)]
LONG_S = 600.0


def make(keep_s: float = LONG_S) -> tuple[TierIndex, Supplies, TierStore, list[Sequence[int]]]:
    index, usable = TierIndex(), list[Sequence[int]]()
    supplies = Supplies(index, keep_s)
    return index, supplies, TierStore(index, supplies, usable.append), usable


async def test_a_look_up_waits_for_the_prefill_leg_and_its_release_ends_the_supply() -> None:
    index, supplies, store, _ = make()
    supplies.expect("pd")
    asking = asyncio.create_task(store.lease(KEYS, "pd", LONG_S))
    await asyncio.sleep(0)
    assert not asking.done()
    index.stored(KEYS[0], 7)
    index.pin(supplies.lease_id("pd"), KEYS[:1])
    supplies.ready("pd")
    lease = await asking
    assert lease is not None
    assert lease.slots == (7,)
    assert lease.still_valid is not None
    assert lease.still_valid()
    store.release(lease.lease_id)
    assert index.pinned_blocks == 0
    assert await store.lease(KEYS, "unknown", 0.0) is not None  # a plain look-up does not wait
    supplies.close()


async def test_a_look_up_before_the_prefill_leg_has_even_begun() -> None:
    index, supplies, store, _ = make()
    asking = asyncio.create_task(store.lease(KEYS, "pd", LONG_S))
    await asyncio.sleep(0)
    supplies.expect("pd")
    index.stored(KEYS[0], 7)
    supplies.ready("pd")
    assert await asking is not None
    supplies.close()


async def test_a_supply_that_nobody_fetches_is_unpinned_in_time() -> None:
    index, supplies, store, _ = make(keep_s=0.0)
    index.stored(KEYS[0], 7)
    index.pin(supplies.lease_id("pd"), KEYS[:1])
    supplies.ready("pd")
    assert index.pinned_blocks == 1
    while index.pinned_blocks:  # noqa: ASYNC110 - the expiry tells nobody
        await asyncio.sleep(0)
    assert await store.lease(KEYS[1:], "pd", LONG_S) is None  # settled: no use waiting


async def test_a_supply_that_does_not_come_costs_its_wait_only() -> None:
    _, supplies, store, _ = make()
    assert await store.lease(KEYS, "never", 0.01) is None
    supplies.close()


async def test_closing_ends_waits() -> None:
    _, supplies, store, _ = make()
    asking = asyncio.create_task(store.lease(KEYS, "pd", LONG_S))
    await asyncio.sleep(0)
    supplies.close()
    assert await asking is None


async def test_a_void_lease_is_not_valid_and_slots_are_passed_on() -> None:
    index, supplies, store, usable = make()
    index.stored(KEYS[0], 7)
    lease = await store.lease(KEYS, "x", 0.0)
    assert lease is not None
    index.cleared()
    assert lease.still_valid is not None
    assert not lease.still_valid()
    store.slots_usable([3, 4])
    assert usable == [[3, 4]]
    supplies.close()
