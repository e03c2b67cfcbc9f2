"""Small scattered blocks travel packed, with the same guarantees: bytes, counts, quarantine, checksums."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from engine_plugin.transport import PullError, PullReason
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.staging import CELL_BYTES, INBOX_BYTES
from tests.integration.transport.rig import PATIENT, WAIT_S, Engine, engine, hashes, until

SMALL = 4096
APART = 2  # every other slot: nobody's neighbour


async def pull(consumer: Engine, producer: Engine, wanted: list[bytes], slots: list[int]) -> int:
    offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=WAIT_S)
    return (await consumer.transport.fetch(offer, slots, deadline_s=WAIT_S)).blocks


def windows_in_use(consumer: Engine) -> int:
    mover = consumer.transport._movers.current
    return len(mover.windows._used) if mover is not None else -1


async def test_scattered_blocks_come_packed_and_land_in_their_slots() -> None:
    blocks = 3 * CELL_BYTES // SMALL + 7  # more than two cells, the last one not full
    small = {"slots": APART * blocks, "slot_bytes": SMALL}
    async with engine(**small) as producer, engine(**small) as consumer:  # type: ignore[arg-type]
        wanted = hashes(blocks)
        producer.store.put(wanted, slots=range(0, APART * blocks, APART))
        targets = list(range(APART * blocks - 1, -1, -APART))
        assert await pull(consumer, producer, wanted, targets) == blocks
        consumer.store.assert_blocks(wanted, targets)
        assert not consumer.store.tier.array[0 : APART * blocks : APART].any(), "nothing beside them"
        assert consumer.stats.packed_moves == 1
        moved = blocks * SMALL
        assert consumer.stats.received_bytes == {producer.identity.instance: moved}
        await until(lambda: producer.stats.served_bytes == {consumer.identity.instance: moved})
        assert windows_in_use(consumer) == 0


async def test_neighbours_and_large_blocks_are_not_packed() -> None:
    async with (
        engine(slot_bytes=SMALL) as producer,
        engine(slot_bytes=SMALL) as consumer,
        engine() as large_producer,
        engine() as large,
    ):
        wanted = hashes(20)
        for source, target, slots in (
            (producer, consumer, list(range(20))),
            (large_producer, large, list(range(39, -1, -2))),
        ):
            source.store.put(wanted)
            assert await pull(target, source, wanted, slots) == 20
            target.store.assert_blocks(wanted, slots)
            assert target.stats.packed_moves == 0
            assert windows_in_use(target) == 0


async def test_more_than_the_inbox_holds_goes_unpacked() -> None:
    blocks = INBOX_BYTES // SMALL + 1
    small = {"slots": APART * blocks, "slot_bytes": SMALL}
    async with engine(**small) as producer, engine(**small) as consumer:  # type: ignore[arg-type]
        wanted = hashes(blocks)
        producer.store.put(wanted, slots=range(blocks))
        assert await pull(consumer, producer, wanted, list(range(0, APART * blocks, APART))) == blocks
        assert consumer.stats.packed_moves == 0


async def test_packed_pulls_at_once_keep_to_their_windows() -> None:
    small = {"slots": 400, "slot_bytes": SMALL}
    async with engine(**small) as producer, engine(**small) as consumer:  # type: ignore[arg-type]
        wanted = hashes(160)
        producer.store.put(wanted, slots=range(0, 320, 2))
        parts = [wanted[at : at + 20] for at in range(0, 160, 20)]
        slots = [list(range(2 * at, 2 * at + 40, 2)) for at in range(0, 160, 20)]
        pulls = (pull(consumer, producer, part, to) for part, to in zip(parts, slots, strict=True))
        assert await asyncio.gather(*pulls) == [20] * 8
        for part, to in zip(parts, slots, strict=True):
            consumer.store.assert_blocks(part, to)
        assert consumer.stats.packed_moves == 8
        assert windows_in_use(consumer) == 0


async def test_a_wrong_block_in_a_packed_move_is_not_used() -> None:
    async with engine(slot_bytes=SMALL) as producer, engine(slot_bytes=SMALL) as consumer:
        wanted = hashes(10)
        producer.store.put(wanted, slots=range(0, 20, 2))
        producer.faults.corrupt_block = 6
        offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=WAIT_S)
        fetched = await consumer.transport.fetch(offer, range(1, 21, 2), deadline_s=WAIT_S)
        assert (fetched.blocks, fetched.shortfall) == (6, PullReason.CHECKSUM)
        assert consumer.stats.packed_moves == 1


async def test_a_window_stays_aside_as_long_as_its_move_is_unresolved() -> None:
    limits = replace(PATIENT, progress_s=0.2, first_progress_s=0.2, quarantine_s=60.0)
    async with (
        engine(slot_bytes=SMALL) as producer,
        engine(slot_bytes=SMALL, limits=limits) as consumer,
    ):
        wanted = hashes(10)
        producer.store.put(wanted, slots=range(0, 20, 2))
        producer.faults.hold_after_chunks = 0
        offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=WAIT_S)
        fetching = asyncio.create_task(consumer.transport.fetch(offer, range(1, 21, 2), deadline_s=WAIT_S))
        await producer.faults.holding.wait()
        mover_pid = producer.transport.mover_pid
        assert mover_pid is not None
        os.kill(mover_pid, signal.SIGSTOP)  # it cannot even say that it has stopped
        try:
            with pytest.raises(PullError) as caught:
                await fetching
            assert caught.value.quarantined == tuple(range(1, 21, 2))
            assert windows_in_use(consumer) == 1
        finally:
            os.kill(mover_pid, signal.SIGCONT)
        await until(lambda: windows_in_use(consumer) == 0)
        assert sorted(consumer.store.usable) == list(range(1, 21, 2))


async def test_our_mover_dies_before_it_has_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Mover.scatter

    def dying(self: Mover, *arguments: object) -> asyncio.Future[None]:
        self.kill()
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Mover, "scatter", dying)
    async with engine(slot_bytes=SMALL) as producer, engine(slot_bytes=SMALL) as consumer:
        wanted = hashes(10)
        producer.store.put(wanted, slots=range(0, 20, 2))
        offer = await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=WAIT_S)
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, range(1, 21, 2), deadline_s=WAIT_S)
        assert (caught.value.reason, caught.value.quarantined) == (PullReason.MOVER_DOWN, ())
        monkeypatch.setattr(Mover, "scatter", real)
        await until(lambda: consumer.stats.mover_epoch == 2 and windows_in_use(consumer) == 0)
        assert await pull(consumer, producer, wanted, list(range(1, 21, 2))) == 10
        consumer.store.assert_blocks(wanted, range(1, 21, 2))
