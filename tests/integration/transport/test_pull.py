"""Pulls that succeed, wholly or in part, between two real transports: bytes, counts, pins."""

from __future__ import annotations

import asyncio

import pytest

from engine_plugin.transport import PullError, PullReason
from engine_plugin.transport.mover.link import Mover
from tests.integration.transport.rig import BLOCK_BYTES, PATIENT, Engine, engine, hashes, until


async def pull(consumer: Engine, producer: Engine, wanted: list[bytes], slots: list[int]) -> int:
    offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=10)
    fetched = await consumer.transport.fetch(offer, slots[: offer.hit_blocks], deadline_s=10)
    assert fetched.shortfall is None
    return fetched.blocks


async def test_bytes_are_equal_and_counted_at_both_ends() -> None:
    async with engine(slots=400) as producer, engine(slots=400) as consumer:
        wanted = hashes(300)
        producer.store.put(wanted, slots=[*range(200, 350), *range(150)])
        slots = [*range(399, 299, -1), *range(200)]  # backwards, then forwards: runs of every shape
        assert await pull(consumer, producer, wanted, slots) == 300
        consumer.store.assert_blocks(wanted, slots)
        await until(lambda: producer.stats.leases == 0)
        moved = 300 * BLOCK_BYTES
        assert consumer.stats.received_bytes == {producer.identity.instance: moved}
        assert producer.stats.served_bytes == {consumer.identity.instance: moved}
        assert consumer.stats.pulls == {"ok": 1}
        assert (sum(consumer.stats.session_setup_s.counts), sum(consumer.stats.transfer_s.counts)) == (1, 1)
        assert (sum(producer.stats.session_setup_s.counts), sum(producer.stats.transfer_s.counts)) == (0, 0)
        assert producer.store.pins == {}
        assert consumer.store.usable == []


async def test_a_lost_notification_costs_a_moment_not_the_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen under load: the source had written everything, but its notification was still in a socket."""
    told = Mover.expect

    def deaf(self: Mover, tag: str) -> asyncio.Future[None]:
        told(self, tag)
        return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Mover, "expect", deaf)
    async with engine() as producer, engine() as consumer:
        wanted = hashes(20)
        producer.store.put(wanted)
        assert await pull(consumer, producer, wanted, list(range(20))) == 20
        consumer.store.assert_blocks(wanted, range(20))
        assert consumer.stats.notifications_missed == 1


async def test_a_partial_hit_moves_the_contiguous_prefix() -> None:
    async with engine() as producer, engine() as consumer:
        wanted = hashes(20)
        producer.store.put(wanted[:7] + wanted[8:], slots=range(19))
        assert await pull(consumer, producer, wanted, list(range(20, 40))) == 7
        consumer.store.assert_blocks(wanted[:7], range(20, 27))
        assert not consumer.store.tier.array[27:40].any()


async def test_fewer_slots_than_offered_take_the_first_blocks() -> None:
    async with engine() as producer, engine() as consumer:
        wanted = hashes(20)
        producer.store.put(wanted)
        offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=10)
        fetched = await consumer.transport.fetch(offer, [5, 3, 9], deadline_s=10)
        assert (offer.hit_blocks, fetched.blocks) == (20, 3)
        consumer.store.assert_blocks(wanted[:3], [5, 3, 9])
        assert producer.stats.served_bytes.total() == 3 * BLOCK_BYTES


async def test_a_miss_leaves_nothing() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(5, first=100))
        with pytest.raises(PullError) as caught:
            await consumer.transport.lookup(producer.transport.address, "r", hashes(5), deadline_s=10)
        assert caught.value.reason is PullReason.MISS
        assert caught.value.quarantined == ()
        assert producer.stats.leases == 0
        assert producer.stats.served_bytes.total() == 0


async def test_many_pulls_share_one_session() -> None:
    async with engine(slots=256) as producer, engine(slots=256) as consumer:
        wanted = hashes(240)
        producer.store.put(wanted)
        parts = [list(range(at, at + 10)) for at in range(0, 240, 10)]
        done = await asyncio.gather(
            *(pull(consumer, producer, [wanted[at] for at in part], part) for part in parts)
        )
        assert done == [10] * 24
        consumer.store.assert_blocks(wanted, range(240))
        assert (consumer.stats.sessions_out, producer.stats.sessions_in) == (1, 1)
        assert producer.stats.mover_infos == 1


async def test_both_directions_at_once() -> None:
    async with engine(slots=128) as left, engine(slots=128) as right:
        ours, theirs = hashes(50), hashes(50, first=1000)
        left.store.put(ours)
        right.store.put(theirs)
        await asyncio.gather(
            pull(left, right, theirs, list(range(60, 110))), pull(right, left, ours, list(range(60, 110)))
        )
        left.store.assert_blocks(theirs, range(60, 110))
        right.store.assert_blocks(ours, range(60, 110))


async def test_an_announced_supply_is_waited_for() -> None:
    async with engine() as producer, engine() as consumer:
        wanted = hashes(4)
        asking = asyncio.create_task(
            consumer.transport.lookup(producer.transport.address, "handoff", wanted, deadline_s=15, wait_s=10)
        )
        await until(lambda: producer.stats.lookups == 1)
        producer.store.put(wanted)
        producer.store.supply.set()
        offer = await asking
        assert offer.hit_blocks == 4
        assert offer.kv_request_id == "handoff"
        consumer.transport.abandon(offer)
        await until(lambda: producer.stats.leases == 0)


async def test_an_offer_is_good_for_one_fetch() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        await consumer.transport.fetch(offer, [0, 1, 2], deadline_s=10)
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, [3, 4, 5], deadline_s=10)
        assert caught.value.reason is PullReason.STALE
        assert not consumer.store.tier.array[3:6].any()


async def test_blocks_that_changed_under_the_lease_are_refused() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        producer.store.still_valid = lambda: False
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, [0, 1, 2], deadline_s=10)
        assert (caught.value.reason, caught.value.quarantined) == (PullReason.STALE, ())
        assert producer.stats.served_bytes.total() == 0
        assert producer.stats.leases == 0


async def test_slots_that_cannot_be_meant_are_a_programming_error() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        for slots in ([], [0, 1, 2, 3], [1, 1], [64], [-1]):
            with pytest.raises(ValueError, match="slots"):
                await consumer.transport.fetch(offer, slots, deadline_s=10)
        assert (await consumer.transport.fetch(offer, [0, 1, 2], deadline_s=10)).blocks == 3


@pytest.mark.parametrize(("corrupt", "usable"), [(0, 0), (3, 3)])
async def test_a_corrupt_block_ends_the_verified_prefix(corrupt: int, usable: int) -> None:
    async with engine() as producer, engine() as consumer:
        wanted = hashes(6)
        producer.store.put(wanted)
        producer.faults.corrupt_block = corrupt
        offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=10)
        if usable:
            fetched = await consumer.transport.fetch(offer, range(6), deadline_s=10)
            assert (fetched.blocks, fetched.shortfall) == (usable, PullReason.CHECKSUM)
            assert fetched.received_bytes == usable * BLOCK_BYTES
        else:
            with pytest.raises(PullError) as caught:
                await consumer.transport.fetch(offer, range(6), deadline_s=10)
            assert (caught.value.reason, caught.value.quarantined) == (PullReason.CHECKSUM, ())
        assert consumer.stats.pulls["checksum"] == 1
        assert consumer.stats.received_bytes.total() == usable * BLOCK_BYTES


async def test_sessions_reconnect_after_the_source_restarts() -> None:
    wanted = hashes(8)
    async with engine(limits=PATIENT) as consumer:
        async with engine() as producer:
            producer.store.put(wanted)
            assert await pull(consumer, producer, wanted, list(range(8))) == 8
            address = producer.transport.address
        await until(lambda: consumer.stats.sessions_out == 0)
        async with engine(listen=address) as reborn:
            reborn.store.put(wanted, slots=range(20, 28))
            assert await pull(consumer, reborn, wanted, list(range(8, 16))) == 8
            consumer.store.assert_blocks(wanted, range(8, 16))
            assert consumer.stats.received_bytes[reborn.identity.instance] == 8 * BLOCK_BYTES


async def test_without_checksums_nothing_is_hashed_and_a_careful_consumer_refuses() -> None:
    async with engine(checksums=False) as producer, engine(checksums=False) as consumer, engine() as careful:
        producer.store.put(hashes(3))
        producer.faults.corrupt_block = 0  # of the announced ones: there are none
        assert await pull(consumer, producer, hashes(3), [2, 1, 0]) == 3
        consumer.store.assert_blocks(hashes(3), [2, 1, 0])
        with pytest.raises(PullError) as caught:
            await pull(careful, producer, hashes(3), [2, 1, 0])
        assert caught.value.reason is PullReason.PROTOCOL
        assert not careful.store.tier.array.any()
        await until(lambda: producer.stats.leases == 0)
