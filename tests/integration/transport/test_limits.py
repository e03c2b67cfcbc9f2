"""What a peer may ask for: turns instead of refusals, bounds on everything, by address and not by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine_plugin import protocol
from engine_plugin.transport import Offer, PullError, PullReason
from engine_plugin.transport.control import handshake as shake
from tests.integration.transport.rig import (
    BLOCK_BYTES,
    PATIENT,
    WAIT_S,
    Engine,
    engine,
    hashes,
    identity,
    until,
)

SLOW = replace(PATIENT, queue_s=60.0, lease_s=60.0)
LONG_S = 120.0


async def look_up(consumer: Engine, producer: Engine, wanted: Sequence[bytes]) -> Offer:
    return await consumer.transport.lookup(producer.transport.address, "r", wanted, deadline_s=LONG_S)


async def pull(consumer: Engine, producer: Engine, wanted: Sequence[bytes], slots: Sequence[int]) -> int:
    offer = await look_up(consumer, producer, wanted)
    fetched = await consumer.transport.fetch(offer, slots[: offer.hit_blocks], deadline_s=LONG_S)
    return fetched.blocks


async def test_a_hundred_pulls_between_one_pair_all_bring_their_blocks() -> None:
    """Before: 64 look-ups and 32 moves were let in, the rest recomputed."""
    limits = replace(SLOW, first_progress_s=LONG_S)
    async with engine(slots=400, limits=limits) as producer, engine(slots=400, limits=limits) as consumer:
        wanted = hashes(400)
        producer.store.put(wanted)
        parts = [list(range(at, at + 4)) for at in range(0, 400, 4)]
        done = await asyncio.gather(
            *(pull(consumer, producer, [wanted[at] for at in part], part) for part in parts)
        )
        assert done == [4] * 100
        consumer.store.assert_blocks(wanted, range(400))
        assert consumer.stats.pulls == {"ok": 100}
        assert producer.stats.refused == {}
        await until(lambda: producer.stats.leases == 0)
        assert producer.transport._producer.leasing.used.count == 0
        assert producer.transport._producer.moves.used.count == 0


async def test_a_greedy_peer_does_not_keep_another_waiting() -> None:
    """One lease at a time for each address: the second address has its own, whatever instances claim."""
    async with (
        engine(limits=replace(SLOW, leases=1)) as producer,
        engine(listen=("127.0.0.2", 0)) as greedy,
        engine(listen=("127.0.0.3", 0)) as modest,
    ):
        producer.store.put(hashes(4))
        first = await look_up(greedy, producer, hashes(4))
        waiting = [asyncio.create_task(look_up(greedy, producer, hashes(4))) for _ in range(20)]
        assert await pull(modest, producer, hashes(4), range(4)) == 4
        modest.store.assert_blocks(hashes(4), range(4))
        assert not any(task.done() for task in waiting)
        greedy.transport.abandon(first)
        for task in waiting:
            greedy.transport.abandon(await asyncio.wait_for(task, LONG_S))


async def test_another_name_brings_no_more_room() -> None:
    """The budget is the address's: an instance is only what a peer says of itself."""
    async with engine(limits=replace(SLOW, leases=1)) as producer, engine() as one, engine() as other:
        producer.store.put(hashes(4))
        offer = await look_up(one, producer, hashes(4))
        with pytest.raises(PullError) as caught:
            await other.transport.lookup(producer.transport.address, "r", hashes(4), deadline_s=0.5)
        assert (caught.value.reason, caught.value.detail) == (PullReason.REFUSED_LIMIT, "leases")
        one.transport.abandon(offer)
        assert await pull(other, producer, hashes(4), range(4)) == 4


async def test_a_turn_that_does_not_come_is_a_refusal_before_the_deadline() -> None:
    async with engine(limits=replace(PATIENT, leases=1, queue_s=0.2)) as producer, engine() as consumer:
        producer.store.put(hashes(2))
        offer = await look_up(consumer, producer, hashes(2))
        with pytest.raises(PullError) as caught:
            await look_up(consumer, producer, hashes(2))
        assert (caught.value.reason, caught.value.detail) == (PullReason.REFUSED_LIMIT, "leases")
        assert producer.stats.refused == {(consumer.identity.instance, "limit"): 1}
        assert consumer.stats.refused == {(producer.identity.instance, "limit"): 1}
        consumer.transport.abandon(offer)
        assert await pull(consumer, producer, hashes(2), range(2)) == 2


async def test_a_move_waits_for_its_turn_and_then_runs() -> None:
    limits = replace(SLOW, moves_in_flight=1)
    async with engine(limits=limits) as producer, engine() as consumer:
        producer.store.put(hashes(8))
        producer.faults.hold_after_chunks = 0
        offers = [await look_up(consumer, producer, hashes(4, first=at)) for at in (0, 4)]
        fetches = [
            asyncio.create_task(consumer.transport.fetch(offer, slots, deadline_s=LONG_S))
            for offer, slots in zip(offers, (range(4), range(4, 8)), strict=True)
        ]
        async with asyncio.timeout(WAIT_S):
            await producer.faults.holding.wait()
        assert producer.transport._producer.moves.used.count == 1
        producer.faults.hold_after_chunks = None
        producer.faults.proceed.set()
        assert [fetched.blocks for fetched in await asyncio.gather(*fetches)] == [4, 4]
        consumer.store.assert_blocks(hashes(8), range(8))


async def test_a_waiting_move_that_is_cancelled_never_starts() -> None:
    limits = replace(SLOW, moves_in_flight=1)
    async with engine(limits=limits) as producer, engine() as consumer:
        producer.store.put(hashes(8))
        producer.faults.hold_after_chunks = 0
        first = await look_up(consumer, producer, hashes(4))
        running = asyncio.create_task(consumer.transport.fetch(first, range(4), deadline_s=LONG_S))
        async with asyncio.timeout(WAIT_S):
            await producer.faults.holding.wait()
        second = await look_up(consumer, producer, hashes(4, first=4))
        waiting = asyncio.create_task(consumer.transport.fetch(second, range(4, 8), deadline_s=LONG_S))
        await until(lambda: consumer.stats.moves_in == 2)
        waiting.cancel()
        await until(lambda: sorted(consumer.store.usable) == [4, 5, 6, 7])
        await until(lambda: producer.stats.leases == 1)
        producer.faults.proceed.set()
        assert (await running).blocks == 4
        assert not consumer.store.tier.array[4:8].any()
        await until(lambda: producer.stats.leases == 0)


@pytest.mark.parametrize(
    ("limit", "blocks", "name"),
    [
        ({"leases": 0}, 1, "leases"),
        ({"leases_total": 0}, 1, "leases"),
        ({"hashes_per_lookup": 2}, 3, "hashes_per_lookup"),
    ],
)
async def test_a_lookup_that_never_fits_is_answered_at_once(
    limit: dict[str, int], blocks: int, name: str
) -> None:
    async with engine(limits=replace(PATIENT, **limit)) as producer, engine() as consumer:
        producer.store.put(hashes(3))
        with pytest.raises(PullError) as caught:
            await look_up(consumer, producer, hashes(blocks))
        assert (caught.value.reason, caught.value.detail) == (PullReason.REFUSED_LIMIT, name)
        assert producer.stats.lookups == 0


@pytest.mark.parametrize(
    "limit", [{"moves_in_flight": 0}, {"moves_total": 0}, {"bytes_in_flight": 1}, {"bytes_total": 1}]
)
async def test_a_move_that_never_fits_never_starts(limit: dict[str, int]) -> None:
    async with engine(limits=replace(PATIENT, **limit)) as producer, engine() as consumer:
        producer.store.put(hashes(3))
        offer = await look_up(consumer, producer, hashes(3))
        with pytest.raises(PullError) as caught:
            await consumer.transport.fetch(offer, range(3), deadline_s=10)
        assert caught.value.reason is PullReason.REFUSED_LIMIT
        assert caught.value.detail == next(iter(limit)).replace("_total", "_in_flight")
        assert caught.value.quarantined == ()
        assert (producer.stats.leases, producer.stats.chunks_written) == (0, 0)


async def test_what_is_pinned_for_peers_is_bounded_in_bytes() -> None:
    """A claim of many blocks is cut to what one peer may pin, and the next waits until that is free."""
    limits = replace(SLOW, leased_share=0.25, leased_floor_bytes=0)
    async with engine(slots=64, limits=limits) as producer, engine() as consumer:
        producer.store.put(hashes(40))
        offer = await look_up(consumer, producer, hashes(40))
        assert offer.hit_blocks == 16
        assert producer.transport._producer.leasing.used.size == 16 * BLOCK_BYTES
        waiting = asyncio.create_task(look_up(consumer, producer, hashes(3)))
        assert (await consumer.transport.fetch(offer, range(16), deadline_s=LONG_S)).blocks == 16
        second = await asyncio.wait_for(waiting, LONG_S)
        assert second.hit_blocks == 3
        assert producer.transport._producer.leasing.used.size == 3 * BLOCK_BYTES
        consumer.transport.abandon(second)


async def raw_session(producer: Engine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An accepted session of an insecure engine, for saying what a `Consumer` never would."""
    reader, writer = await asyncio.open_connection(*producer.transport.address)
    writer.write(protocol.encode(shake.hello(identity())))
    for _ in range(2):  # hello, accepted
        size = int.from_bytes(await reader.readexactly(4), "big")
        protocol.decode_server(await reader.readexactly(size))
    return reader, writer


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(WAIT_S):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionResetError:
            pass
    writer.close()


TOO_MUCH: dict[str, Any] = {
    "hashes of a look-up": protocol.Lookup(1, "r", [b"h"] * (protocol.MAX_BLOCKS + 1)),
    "slots of a move": protocol.Move(1, "t", "l", 1, [0] * (protocol.MAX_BLOCKS + 1), []),
    "generations of a move": protocol.Move(1, "t", "l", 1, [], [0] * (protocol.MAX_BLOCKS + 1)),
}


@pytest.mark.parametrize("what", TOO_MUCH)
async def test_counts_beyond_any_need_close_the_connection(what: str) -> None:
    async with engine(key=None) as producer:
        reader, writer = await raw_session(producer)
        writer.write(protocol.encode(TOO_MUCH[what]))
        await closes(reader, writer)
        assert (producer.stats.bad_frames, producer.stats.lookups) == (1, 0)


async def test_a_message_beyond_its_size_closes_the_connection_by_its_header() -> None:
    async with engine(key=None) as producer:
        reader, writer = await raw_session(producer)
        writer.write((PATIENT.message_bytes + 1).to_bytes(4, "big"))
        await closes(reader, writer)
        assert producer.stats.bad_frames == 1


async def test_new_movers_without_end_close_the_connection() -> None:
    async with engine(key=None, limits=replace(PATIENT, movers_burst=3, movers_per_s=0.0)) as producer:
        for _ in range(2):  # the second connection of the same address has no new allowance
            who = identity()
            reader, writer = await asyncio.open_connection(*producer.transport.address)
            writer.write(protocol.encode(shake.hello(who)))
            for epoch in range(5):
                info = protocol.MoverInfo(epoch, f"{who.instance}-0#{epoch}", b"x", 0, 4)
                writer.write(protocol.encode(info))
            await closes(reader, writer)
        assert producer.stats.mover_infos == 3
        assert producer.stats.bad_frames == 2


async def test_connections_are_counted_by_address() -> None:
    async with engine(key=None, limits=replace(PATIENT, connections_per_peer=2)) as producer:
        first, second = await raw_session(producer), await raw_session(producer)
        reader, writer = await asyncio.open_connection(*producer.transport.address)
        writer.write(protocol.encode(shake.hello(identity())))
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        assert b"connections_per_peer" in answer
        assert producer.stats.sessions_in == 2
        for _, open_writer in (first, second):
            open_writer.close()


async def test_more_blocks_than_a_lookup_may_name_are_asked_for_in_part() -> None:
    limits = replace(PATIENT, hashes_per_lookup=3)
    async with engine(limits=limits) as producer, engine(limits=limits) as consumer:
        producer.store.put(hashes(5))
        assert await pull(consumer, producer, hashes(5), range(5)) == 3
        consumer.store.assert_blocks(hashes(3), range(3))
