"""What happens before a request asks for it: sessions kept open, and blocks pulled by order."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine_plugin import protocol
from engine_plugin.transport import PrefetchOrder, PrefetchResult, PullError, PullReason
from engine_plugin.transport.orders import PrefetchOrders
from tests.integration.transport.rig import (
    BLOCK_BYTES,
    KEY,
    PATIENT,
    WAIT_S,
    Engine,
    engine,
    hashes,
    identity,
    until,
)
from tests.integration.transport.test_encryption import say

EAGER = replace(PATIENT, redial_s=0.05, redial_max_s=0.05, keep_redial_max_s=0.1)


class Puller:
    """An engine's part of a prefetch: look up, fetch into the first slots."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.orders: list[PrefetchOrder] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, order: PrefetchOrder) -> PrefetchResult:
        assert self.engine is not None
        self.orders.append(order)
        await self.go.wait()
        transport = self.engine.transport
        try:
            offer = await transport.lookup(
                order.source, order.kv_request_id, order.hashes, deadline_s=order.deadline_s
            )
            fetched = await transport.fetch(offer, range(offer.hit_blocks), deadline_s=order.deadline_s)
        except PullError as error:
            return PrefetchResult(0, 0, error.reason.value)
        return PrefetchResult(fetched.blocks, fetched.received_bytes)


def order(source: Engine, count: int, deadline_s: float = WAIT_S) -> PrefetchOrder:
    return PrefetchOrder(source.transport.address, "ahead", tuple(hashes(count)), deadline_s)


async def test_an_engine_pulls_what_it_is_ordered_to() -> None:
    pulling = Puller()
    async with engine() as source, engine(prefetcher=pulling) as target, engine() as caller:
        pulling.engine = target
        source.store.put(hashes(3))
        result = await caller.transport.prefetch(target.transport.address, order(source, 5))
        assert result == PrefetchResult(3, 3 * BLOCK_BYTES)
        target.store.assert_blocks(hashes(3), range(3))
        assert target.stats.received_bytes == {source.identity.instance: 3 * BLOCK_BYTES}
        assert not caller.store.tier.array.any()
        missed = await caller.transport.prefetch(
            target.transport.address, PrefetchOrder(source.transport.address, "m", (b"no such",), WAIT_S)
        )
        assert missed == PrefetchResult(0, 0, "miss")


async def test_an_engine_that_takes_no_orders_says_so() -> None:
    async with engine() as target, engine() as caller:
        with pytest.raises(PullError) as caught:
            await caller.transport.prefetch(target.transport.address, order(caller, 1))
        assert caught.value.reason is PullReason.PROTOCOL
        assert "takes no prefetch orders" in caught.value.detail
        assert target.stats.sessions_in == 1, "and nothing else happens to the session"


@pytest.mark.parametrize(
    ("limit", "name"),
    [({"prefetches": 1}, "prefetches"), ({"prefetch_burst_blocks": 3}, "prefetch_blocks_per_s")],
)
async def test_orders_are_rated(limit: dict[str, int], name: str) -> None:
    pulling = Puller()
    limits = replace(PATIENT, prefetch_blocks_per_s=0.0, **limit)  # type: ignore[arg-type]
    async with engine() as source, engine(prefetcher=pulling, limits=limits) as target, engine() as caller:
        pulling.engine = target
        source.store.put(hashes(2))
        pulling.go.clear()
        first = asyncio.create_task(caller.transport.prefetch(target.transport.address, order(source, 2)))
        await until(lambda: len(pulling.orders) == 1)
        with pytest.raises(PullError) as caught:
            await caller.transport.prefetch(target.transport.address, order(source, 2))
        assert (caught.value.reason, caught.value.detail) == (PullReason.REFUSED_LIMIT, name)
        assert target.stats.refused == {(caller.identity.instance, "limit"): 1}
        pulling.go.set()
        assert (await first).blocks == 2
        assert len(pulling.orders) == 1


async def test_an_order_without_the_key_is_not_heard() -> None:
    pulling = Puller()
    async with engine(prefetcher=pulling) as target:
        pulling.engine = target
        await say(target, protocol.encode(protocol.Prefetch(1, "r", "127.0.0.1", 9, hashes(1), 1000)))
        assert pulling.orders == []
        assert target.stats.sessions_out == 0, "nobody was dialled"


async def test_a_prefetch_ends_by_its_deadline_and_makes_room_for_the_next() -> None:
    pulling = Puller()
    limits = replace(PATIENT, prefetches=1, prefetch_s=0.1)
    async with engine() as source, engine(prefetcher=pulling, limits=limits) as target, engine() as caller:
        pulling.engine = target
        source.store.put(hashes(1))
        pulling.go.clear()
        with pytest.raises(PullError) as caught:
            await caller.transport.prefetch(target.transport.address, order(source, 1))
        assert caught.value.reason is PullReason.TIMEOUT
        pulling.go.set()
        target.transport._producer.prefetching._limits = PATIENT
        assert (await caller.transport.prefetch(target.transport.address, order(source, 1))).blocks == 1


async def test_peers_are_connected_before_any_pull_and_again_after_a_restart() -> None:
    async with engine(limits=EAGER) as consumer:
        async with engine() as first, engine() as second:
            peers = [first.transport.address, second.transport.address, consumer.transport.address]
            consumer.transport.keep_connected(peers)
            await until(lambda: first.stats.mover_infos == second.stats.mover_infos == 1)
            assert consumer.stats.sessions_out == 2
            assert consumer.stats.lookups == consumer.stats.sessions_in == 0, "not to itself"
            address = first.transport.address
        await until(lambda: consumer.stats.sessions_out == 0)
        async with engine(listen=address) as reborn:
            await until(lambda: reborn.stats.mover_infos == 1)
            consumer.transport.keep_connected([])
            reborn.store.put(hashes(2))
            offer = await consumer.transport.lookup(address, "r", hashes(2), deadline_s=WAIT_S)
            assert (await consumer.transport.fetch(offer, range(2), deadline_s=WAIT_S)).blocks == 2
            assert reborn.stats.mover_infos == 1, "over the session that was there"


async def test_a_peer_that_refuses_is_tried_again_and_harms_nobody() -> None:
    async with engine(limits=EAGER) as consumer, engine(key=KEY[::-1]) as stranger, engine() as friend:
        consumer.transport.keep_connected([stranger.transport.address, friend.transport.address])
        await until(lambda: stranger.stats.handshakes_unfinished >= 2 and friend.stats.sessions_in == 1)
        assert stranger.stats.sessions_in == 0


# --- orders of a picker --------------------------------------------------------------------------------
def of_tokens(source: Engine, tokens: int) -> PrefetchOrder:
    return PrefetchOrder(source.transport.address, "turn", (), WAIT_S, range(tokens), "salt", "adapter")


async def test_a_picker_orders_by_tokens_and_is_no_peer() -> None:
    """It knows nothing of the engines' layout; the key makes it one that may order."""
    pulling = Puller()
    async with engine() as source, engine(prefetcher=pulling) as target:
        pulling.engine = target
        orders = PrefetchOrders((KEY,), PATIENT)
        try:
            result = await orders.order(target.transport.address, of_tokens(source, 40))
        finally:
            await orders.stop()
        assert result == PrefetchResult(0, 0, "miss"), "this engine names blocks by hashes only"
        (heard,) = pulling.orders
        assert (list(heard.tokens), heard.cache_salt, heard.lora_name) == (list(range(40)), "salt", "adapter")
        assert target.stats.refused == {}


async def test_blocks_of_tokens_are_rated_as_blocks() -> None:
    pulling = Puller()
    block = identity().block_size_tokens
    limits = replace(PATIENT, prefetch_blocks_per_s=0.0, prefetch_burst_blocks=3)
    async with engine() as source, engine(prefetcher=pulling, limits=limits) as target:
        pulling.engine = target
        orders = PrefetchOrders((KEY,), PATIENT)
        try:
            with pytest.raises(PullError) as caught:
                await orders.order(target.transport.address, of_tokens(source, 4 * block))
            assert caught.value.reason is PullReason.REFUSED_LIMIT
            await orders.order(target.transport.address, of_tokens(source, 3 * block))
        finally:
            await orders.stop()
    assert len(pulling.orders) == 1


async def test_who_does_not_hold_the_key_orders_nothing() -> None:
    pulling = Puller()
    async with engine() as source, engine(prefetcher=pulling) as target:
        orders = PrefetchOrders((KEY[::-1],), PATIENT)
        try:
            with pytest.raises(PullError) as caught:
                await orders.order(target.transport.address, of_tokens(source, 40))
        finally:
            await orders.stop()
    assert caught.value.reason is PullReason.REFUSED_AUTH
    assert pulling.orders == []


async def test_a_picker_may_order_and_nothing_else() -> None:
    """It has no layout that could be compared, so it may not ask for blocks."""
    async with engine() as source:
        source.store.put(hashes(1))
        orders = PrefetchOrders((KEY,), PATIENT)
        try:
            session = await orders._dialer.session(source.transport.address)
            with pytest.raises(PullError) as caught:
                await session.lookup("r", hashes(1), wait_s=0.0, patience_s=0.0)
        finally:
            await orders.stop()
        assert caught.value.reason is PullReason.DISCONNECTED
        assert (source.stats.lookups, source.stats.bad_frames) == (0, 1)


async def test_without_a_key_an_engine_takes_no_orders_of_pickers() -> None:
    pulling = Puller()
    async with engine(prefetcher=pulling, key=None) as target:
        hello = protocol.Hello(protocol.MAGIC, protocol.VERSION, identity(), "picker")
        await say(target, protocol.encode(hello))
        await until(lambda: sum(target.stats.refused.values()) == 1)
        assert target.stats.sessions_in == 0
    assert pulling.orders == []
