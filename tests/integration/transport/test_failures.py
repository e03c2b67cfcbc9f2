"""Peers and movers that die, stop or go mute in the middle: bounded errors, quarantine, no late bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace

import pytest

from engine_plugin.transport import PullError, PullReason
from tests.integration.transport.peer_process import PeerProcess, peer_process
from tests.integration.transport.rig import BLOCK_BYTES, PATIENT, WAIT_S, Engine, engine, hashes, until

BLOCKS = 256  # 8 MiB: eight chunks of 1 MiB
WANTED = hashes(BLOCKS)
SLOTS = list(range(BLOCKS))
IMPATIENT = replace(PATIENT, progress_s=0.5, first_progress_s=5.0, quarantine_s=30.0)


async def start_fetch(consumer: Engine, source: tuple[str, int]) -> asyncio.Task[PullError]:
    """A fetch that is expected to fail, as a task."""
    offer = await consumer.transport.lookup(source, "r", WANTED, deadline_s=10)
    assert offer.hit_blocks == BLOCKS

    async def fetch() -> PullError:
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, SLOTS, deadline_s=15)
        return caught.value

    return asyncio.create_task(fetch())


async def middle_of_a_pull(consumer: Engine, source: PeerProcess) -> asyncio.Task[PullError]:
    """A fetch of which three chunks have been written and reported."""
    fetching = await start_fetch(consumer, source.address)
    assert (await source.heard("holding"))["chunks"] == 3
    await until(lambda: consumer.stats.chunks_reported == 3)
    return fetching


async def usable_again(consumer: Engine) -> None:
    async with asyncio.timeout(WAIT_S):
        await consumer.store.usable_changed.wait()
    assert sorted(consumer.store.usable) == SLOTS
    assert consumer.stats.quarantined_slots == 0


async def test_source_killed_in_mid_pull() -> None:
    async with (
        engine(slots=2 * BLOCKS) as consumer,
        peer_process(blocks=BLOCKS, slots=BLOCKS) as second,
        peer_process(blocks=BLOCKS, slots=BLOCKS, hold_after_chunks=3) as first,
    ):
        fetching = await middle_of_a_pull(consumer, first)
        first.signal(signal.SIGKILL)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert error.reason is PullReason.DISCONNECTED
        assert sorted(error.quarantined) == SLOTS
        assert consumer.stats.quarantined_slots == BLOCKS

        other = list(range(BLOCKS, 2 * BLOCKS))
        offer = await consumer.transport.lookup(second.address, "r", WANTED, deadline_s=10)
        assert (await consumer.transport.fetch(offer, other, deadline_s=15)).blocks == BLOCKS
        consumer.store.assert_blocks(WANTED, other)

        await usable_again(consumer)
        await until(lambda: consumer.stats.mover_epoch == 2)
        offer = await consumer.transport.lookup(second.address, "r", WANTED, deadline_s=10)
        assert (await consumer.transport.fetch(offer, SLOTS, deadline_s=15)).blocks == BLOCKS
        consumer.store.assert_blocks(WANTED, SLOTS)
        assert consumer.stats.received_bytes == {second.instance: 2 * BLOCKS * BLOCK_BYTES}


async def test_only_the_sources_mover_dies() -> None:
    async with (
        engine(slots=BLOCKS) as consumer,
        peer_process(blocks=BLOCKS, slots=BLOCKS, hold_after_chunks=3) as source,
    ):
        fetching = await middle_of_a_pull(consumer, source)
        os.kill(source.mover_pid, signal.SIGKILL)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert error.reason is PullReason.MOVER_DOWN
        assert sorted(error.quarantined) == SLOTS
        source.write("proceed")
        await usable_again(consumer)
        await pull_again(consumer, source.address)


async def pull_again(consumer: Engine, source: tuple[str, int]) -> None:
    """Retry, as new requests would, until the source's new mover is up; then the bytes are right."""
    async with asyncio.timeout(WAIT_S):
        while True:
            offer = await consumer.transport.lookup(source, "again", WANTED, deadline_s=10)
            try:
                fetched = await consumer.transport.fetch(offer, SLOTS, deadline_s=15)
                break
            except PullError as error:
                refused = (error.reason, error.quarantined)
            assert refused == (PullReason.MOVER_DOWN, ())
            await asyncio.sleep(0.05)
    assert fetched.blocks == BLOCKS
    consumer.store.assert_blocks(WANTED, SLOTS)


async def test_our_mover_dies_in_mid_pull() -> None:
    async with (
        engine(slots=BLOCKS) as consumer,
        peer_process(blocks=BLOCKS, slots=BLOCKS, hold_after_chunks=3) as source,
    ):
        fetching = await middle_of_a_pull(consumer, source)
        assert consumer.transport.mover_pid is not None
        os.kill(consumer.transport.mover_pid, signal.SIGKILL)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert error.reason is PullReason.MOVER_DOWN
        assert error.quarantined == (), "the mapping is gone with the process, so nothing can be written"
        source.write("proceed")
        await until(lambda: consumer.stats.mover_epoch == 2)
        await pull_again(consumer, source.address)


async def test_a_stopped_source_times_out_and_its_late_bytes_cannot_land() -> None:
    limits = replace(IMPATIENT, quarantine_s=0.5)
    async with (
        engine(slots=BLOCKS, limits=limits) as consumer,
        peer_process(blocks=BLOCKS, slots=BLOCKS, hold_after_chunks=3) as source,
    ):
        fetching = await middle_of_a_pull(consumer, source)
        source.signal(signal.SIGSTOP)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert error.reason is PullReason.TIMEOUT
        await usable_again(consumer)

        consumer.store.tier.array[:] = 0xA5  # the slots are reused
        source.write("proceed")
        source.signal(signal.SIGCONT)
        await until_idle(source)
        assert (consumer.store.tier.array == 0xA5).all()


async def test_a_source_that_goes_on_frees_the_slots_itself() -> None:
    async with (
        engine(slots=BLOCKS, limits=IMPATIENT) as consumer,
        peer_process(blocks=BLOCKS, slots=BLOCKS, hold_after_chunks=3) as source,
    ):
        fetching = await middle_of_a_pull(consumer, source)
        source.signal(signal.SIGSTOP)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert sorted(error.quarantined) == SLOTS
        source.signal(signal.SIGCONT)
        await usable_again(consumer)
        assert consumer.stats.mover_epoch == 1, "no mover had to be replaced"
        await until_idle(source)


@pytest.mark.parametrize("replaced", [True, False])
async def test_writes_already_posted_land_in_quarantine_or_nowhere(replaced: bool) -> None:
    """Our mover is stopped with the source's writes in its sockets; nothing can take those back."""
    limits = replace(IMPATIENT, quarantine_s=0.3 if replaced else 60.0, mover_silence_s=120.0)
    async with engine(slots=BLOCKS) as producer, engine(slots=BLOCKS, limits=limits) as consumer:
        producer.store.put(WANTED)
        warm = await consumer.transport.lookup(producer.transport.address, "warm", WANTED[:1], deadline_s=10)
        await consumer.transport.fetch(warm, [0], deadline_s=15)
        consumer.store.tier.array[:] = 0xA5
        mover_pid = consumer.transport.mover_pid
        assert mover_pid is not None
        os.kill(mover_pid, signal.SIGSTOP)
        fetching = await start_fetch(consumer, producer.transport.address)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert (error.reason, sorted(error.quarantined)) == (PullReason.TIMEOUT, SLOTS)
        assert producer.stats.moves_out == 1
        if not replaced:
            os.kill(mover_pid, signal.SIGCONT)
        await usable_again(consumer)
        await until(lambda: producer.stats.moves_out == 0)
        assert (consumer.store.tier.array == 0xA5).all() == replaced
        await until(lambda: consumer.stats.mover_epoch == (2 if replaced else 1))
        await until(lambda: producer.stats.leases == 0)


async def until_idle(source: PeerProcess) -> None:
    """Until the source has no lease, pin or move left."""
    async with asyncio.timeout(WAIT_S):
        while True:
            source.write("state")
            state = await source.heard("state")
            if (state["leases"], state["pins"], state["moves"]) == (0, 0, 0):
                return
            await asyncio.sleep(0.02)


async def test_a_cancelled_fetch_names_its_slots_when_they_are_free() -> None:
    async with engine(slots=BLOCKS) as producer, engine(slots=BLOCKS) as consumer:
        producer.store.put(WANTED)
        producer.faults.hold_after_chunks = 1
        fetching = await start_fetch(consumer, producer.transport.address)
        async with asyncio.timeout(WAIT_S):
            await producer.faults.holding.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await usable_again(consumer)
        await until(lambda: producer.stats.leases == 0)
        assert producer.store.pins == {}


async def test_a_mute_source_costs_the_deadline_once_and_pins_nothing() -> None:
    """S-E08: after a failure the source is left alone for a moment, so the next pull gives up at once."""
    patient = replace(PATIENT, redial_s=60.0, redial_max_s=60.0)
    async with (
        engine() as producer,
        engine(limits=patient) as consumer,
        engine(limits=replace(PATIENT, redial_s=0.0)) as eager,
    ):
        producer.store.put(hashes(4))
        producer.faults.stall_lookup = True
        with pytest.raises(PullError) as caught:
            await consumer.transport.lookup(producer.transport.address, "r", hashes(4), deadline_s=0.3)
        assert caught.value.reason is PullReason.TIMEOUT
        with pytest.raises(PullError) as caught:
            await consumer.transport.lookup(producer.transport.address, "r", hashes(4), deadline_s=60)
        assert caught.value.reason is PullReason.TIMEOUT
        assert producer.stats.lookups == 1, "the second look-up was not sent"
        producer.faults.proceed.set()
        producer.faults.stall_lookup = False
        offer = await eager.transport.lookup(producer.transport.address, "r", hashes(4), deadline_s=10)
        eager.transport.abandon(offer)
        await until(lambda: producer.stats.leases == 0)
        assert producer.store.pins == {}


async def test_a_port_that_accepts_and_never_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        async with engine(limits=replace(PATIENT, handshake_s=0.2)) as consumer:
            with pytest.raises(PullError) as caught:
                await consumer.transport.lookup(silent.getsockname(), "r", hashes(1), deadline_s=10)
            assert caught.value.reason is PullReason.TIMEOUT


async def test_a_closed_port_is_unreachable_and_remembered_for_a_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    async with engine(limits=replace(PATIENT, redial_s=60.0, redial_max_s=60.0)) as consumer:
        for _ in range(3):
            with pytest.raises(PullError) as caught:
                await consumer.transport.lookup(address, "r", hashes(1), deadline_s=10)
            assert caught.value.reason is PullReason.UNREACHABLE
        assert consumer.stats.pulls == {"unreachable": 3}


async def test_a_lease_that_nobody_fetches_ends_by_its_deadline() -> None:
    async with engine(limits=replace(PATIENT, lease_s=0.2)) as producer, engine() as consumer:
        producer.store.put(hashes(4))
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(4), deadline_s=10)
        assert len(producer.store.pins) == 1
        await until(lambda: producer.stats.leases_expired == 1)
        assert (producer.stats.leases, producer.store.pins) == (0, {})
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, range(4), deadline_s=10)
        assert (caught.value.reason, caught.value.quarantined) == (PullReason.STALE, ())


async def test_a_move_that_outlives_its_lease_is_cancelled() -> None:
    async with (
        engine(slots=BLOCKS, limits=replace(PATIENT, lease_s=0.3)) as producer,
        engine(slots=BLOCKS) as consumer,
    ):
        producer.store.put(WANTED)
        producer.faults.hold_after_chunks = 1
        fetching = await start_fetch(consumer, producer.transport.address)
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert (error.reason, error.quarantined) == (PullReason.TIMEOUT, ())
        await until(lambda: producer.stats.leases == 0)
        assert producer.store.pins == {}


async def test_a_thousand_abandoned_lookups_leave_no_lease() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(2))
        for at in range(1000):
            asking = asyncio.create_task(
                consumer.transport.lookup(producer.transport.address, str(at), hashes(2), deadline_s=10)
            )
            if at % 2:
                consumer.transport.abandon(await asking)
            else:
                for _ in range(at % 7):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait({asking})
                if not asking.cancelled():
                    consumer.transport.abandon(asking.result())
        offer = await consumer.transport.lookup(producer.transport.address, "last", hashes(2), deadline_s=10)
        consumer.transport.abandon(offer)
        await until(lambda: producer.stats.leases == 0)
        assert producer.store.pins == {}
        assert producer.stats.lookups > 500


async def test_stopping_the_consumer_releases_the_producer() -> None:
    async with engine(slots=BLOCKS) as producer:
        producer.store.put(WANTED)
        producer.faults.hold_after_chunks = 1
        async with engine(slots=BLOCKS) as consumer:
            fetching = await start_fetch(consumer, producer.transport.address)
            async with asyncio.timeout(WAIT_S):
                await producer.faults.holding.wait()
        error = await asyncio.wait_for(fetching, WAIT_S)
        assert error.reason is PullReason.DISCONNECTED
        assert sorted(consumer.store.usable) == sorted(error.quarantined)
        await until(lambda: producer.stats.leases == 0 and producer.stats.sessions_in == 0)
        assert producer.store.pins == {}
