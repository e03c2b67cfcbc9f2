"""`kv_transfer_params` as the emulated engine understands them, and the store it serves peers from."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deploy.local.engine.kv_params import (
    IllegalTransfer,
    Source,
    TransferParams,
    parse_transfer,
    read_as_old_engine,
)
from deploy.local.engine.store import CpuStore
from engine_plugin import wire
from epp.engine_model.cache import TierPool

PEER = wire.kv_source_params("id", "10.0.0.1", 7777)
ADDRESS = ("10.0.0.1", 7777)


@pytest.mark.parametrize(
    ("params", "meaning"),
    [
        (None, TransferParams()),
        ({}, TransferParams()),
        ({"remote_kv_source": PEER}, TransferParams(source=Source(ADDRESS, "id"))),
        ({"remote_prefiller": PEER}, TransferParams(source=Source(ADDRESS, "id", True, True))),
        ({"remote_decoder": {"kv_request_id": "x"}}, TransferParams(supply_id="x")),
        (
            {"remote_decoder": {"kv_request_id": "x"}, "remote_kv_source": PEER},
            TransferParams(source=Source(ADDRESS, "id"), supply_id="x"),
        ),
        (wire.nixl_prefill_params(), TransferParams(answers_with_params=True)),
        (
            {"do_remote_prefill": True, "do_remote_decode": False, **PEER},
            TransferParams(source=Source(ADDRESS, "id", True)),
        ),
        ({"remote_kv_source": PEER | {"remote_port": "7777"}}, TransferParams(source=Source(ADDRESS, "id"))),
    ],
)
def test_meaning(params: Any, meaning: TransferParams) -> None:
    assert parse_transfer(params) == meaning


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("host:port", "kv_request_id"),
        ({}, "kv_request_id"),
        (PEER | {"kv_request_id": ""}, "kv_request_id"),
        (PEER | {"kv_request_id": "x" * 257}, "kv_request_id"),
        (PEER | {"remote_host": None}, "remote_host"),
        (PEER | {"remote_port": 0}, "remote_port"),
        (PEER | {"remote_port": 65_536}, "remote_port"),
        (PEER | {"remote_port": True}, "remote_port"),
        (PEER | {"remote_port": "77x"}, "remote_port"),
    ],
)
@pytest.mark.parametrize("key", ["remote_kv_source", "remote_prefiller"])
def test_a_source_that_cannot_be_used_is_named_and_never_an_error(key: str, source: Any, place: str) -> None:
    meaning = parse_transfer({key: source})
    assert meaning.source is None
    assert meaning.malformed == f"{key}.{place}"


@pytest.mark.parametrize(
    "params",
    [
        [],
        "x",
        {"remote_prefiller": PEER, "remote_kv_source": PEER},
        {"remote_prefiller": PEER, "remote_decoder": {"kv_request_id": "x"}},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": True, "remote_kv_source": PEER},
    ],
)
def test_contradictions_are_refused(params: Any) -> None:
    with pytest.raises(IllegalTransfer):
        parse_transfer(params)


NAMES = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def pool() -> TierPool:
    """Four slots that hold the blocks 0, 1, 2 of a chain."""
    pool = TierPool(4)
    allocation = pool.allocate(3)
    assert allocation is not None
    for slot, name in zip(allocation.slots, NAMES, strict=False):
        pool.commit(slot, name)
    pool.unpin(allocation.slots)
    return pool


async def test_lease_pins_the_contiguous_prefix_until_released(pool: TierPool) -> None:
    store = CpuStore(pool, supply_keep_s=30)
    lease = await store.lease([NAMES[0], NAMES[1], NAMES[3], NAMES[2]], "id", 0)
    assert lease is not None
    assert lease.slots == (0, 1)
    assert pool.in_use == 2
    assert lease.still_valid is not None
    assert lease.still_valid()
    store.release(lease.lease_id)
    store.release(lease.lease_id)
    assert (pool.in_use, lease.still_valid()) == (0, False)
    assert await store.lease([NAMES[3]], "id", 0) is None


async def test_look_up_waits_for_the_announced_supply(pool: TierPool) -> None:
    store = CpuStore(pool, supply_keep_s=30)
    waiting = asyncio.create_task(store.lease([NAMES[0]], "pd", 30))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.announce("pd", (0, 1, 2))
    lease = await waiting
    assert lease is not None
    assert pool.in_use == 3
    store.release(lease.lease_id)
    assert (pool.in_use, store.supplies) == (0, 0)
    pool.check_integrity()


async def test_failed_supply_ends_the_wait_and_is_remembered(pool: TierPool) -> None:
    store = CpuStore(pool, supply_keep_s=30)
    pool.clear()
    waiting = asyncio.create_task(store.lease([NAMES[0]], "pd", 30))
    await asyncio.sleep(0)
    store.fail_supply("pd")
    assert await waiting is None
    assert await store.lease([NAMES[0]], "pd", 30) is None  # at once


async def test_cancelled_look_up_pins_nothing_and_forgets_its_wait(pool: TierPool) -> None:
    store = CpuStore(pool, supply_keep_s=30)
    waiting = asyncio.create_task(store.lease([NAMES[0]], "pd", 30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    store.announce("pd", (0,))
    assert (store.leases, pool.in_use) == (0, 1)
    store.close()
    assert pool.in_use == 0


def test_an_old_engine_knows_its_own_keys_only() -> None:
    source = {"kv_request_id": "i", "remote_host": "10.0.0.1", "remote_port": 7777}

    def meaning(params: object) -> TransferParams:
        return parse_transfer(read_as_old_engine({"kv_transfer_params": params})["kv_transfer_params"])

    assert meaning({"remote_kv_source": source}) == TransferParams(), "no error, no pull"
    assert meaning({"p2p": source}).source == Source(("10.0.0.1", 7777), "i")
    assert meaning({"decode": {"kv_request_id": "i"}}).supply_id == "i"
    assert read_as_old_engine({"prompt": "x"}) == {"prompt": "x"}
