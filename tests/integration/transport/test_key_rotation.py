"""The pool's key is replaced while engines run: real handshakes at every step; a removed key is refused."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from engine_plugin.transport import PullError, PullReason
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.orders import PrefetchOrders
from engine_plugin.transport.peer_keys import follow
from engine_plugin.transport.types import PrefetchOrder
from tests.integration.transport.rig import (
    BLOCK_BYTES,
    KEY,
    PATIENT,
    WAIT_S,
    Engine,
    engine,
    hashes,
    until,
)

OLD, NEW = KEY, b"fedcba9876543210fedcba9876543210"
STEPS = [((OLD,), (OLD, NEW)), ((OLD, NEW), (NEW, OLD)), ((NEW, OLD), (NEW,))]


async def pull(consumer: Engine, producer: Engine, count: int = 3) -> None:
    source = producer.transport.address
    offer = await consumer.transport.lookup(source, "r", hashes(count), deadline_s=WAIT_S)
    fetched = await consumer.transport.fetch(offer, range(count), deadline_s=WAIT_S)
    assert fetched.blocks == count
    consumer.store.assert_blocks(hashes(count), range(count))


async def refusal(consumer: Engine, producer: Engine) -> PullReason:
    with pytest.raises(PullError) as caught:
        await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=WAIT_S)
    return caught.value.reason


@pytest.mark.parametrize(("before", "after"), STEPS)
@pytest.mark.parametrize("first", ["producer", "consumer"])
async def test_at_no_step_do_two_engines_refuse_each_other(
    before: tuple[bytes, ...], after: tuple[bytes, ...], first: str
) -> None:
    """One of them has taken the step and the other has not, in new sessions."""
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        for one in (producer, consumer):
            await one.transport.use_keys(before)
        await (producer if first == "producer" else consumer).transport.use_keys(after)
        await pull(consumer, producer)
        assert (producer.stats.refused, consumer.stats.refused) == ({}, {})


async def test_without_the_step_between_they_would() -> None:
    """Negative control of the test above: the key exchanged at once."""
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        await producer.transport.use_keys((NEW,))
        assert await refusal(consumer, producer) is PullReason.REFUSED_AUTH
        assert (producer.stats.sessions_in, producer.stats.lookups) == (0, 0)
        await consumer.transport.use_keys((NEW,))  # and its refusal is not remembered
        await pull(consumer, producer)


async def test_a_session_outlives_a_change_that_leaves_its_key() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        await pull(consumer, producer)
        for one in (producer, consumer):
            await one.transport.use_keys((OLD, NEW))
        for one in (consumer, producer):
            await one.transport.use_keys((NEW, OLD))
        await pull(consumer, producer)
        assert sum(consumer.stats.session_setup_s.counts) == 1, "still the first session"
        assert len(set(producer.transport.key_ids)) == 2
        assert producer.transport.key_ids == consumer.transport.key_ids


@pytest.mark.parametrize("remover", ["producer", "consumer"])
async def test_a_removed_key_is_refused_and_its_sessions_end(remover: str) -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        await pull(consumer, producer)
        assert (producer.stats.sessions_in, consumer.stats.sessions_out) == (1, 1)
        await (producer if remover == "producer" else consumer).transport.use_keys((NEW,))
        await until(lambda: (producer.stats.sessions_in, consumer.stats.sessions_out) == (0, 0))
        assert await refusal(consumer, producer) is PullReason.REFUSED_AUTH
        assert (producer.stats.leases, producer.store.pins) == (0, {})


async def test_a_pull_in_flight_ends_with_its_key() -> None:
    """Its slots stay in quarantine like those of any lost session, and come back."""
    limits = replace(PATIENT, chunk_bytes=BLOCK_BYTES)
    async with engine(limits=limits) as producer, engine(limits=limits) as consumer:
        producer.store.put(hashes(8))
        producer.faults.hold_after_chunks = 1
        source = producer.transport.address
        offer = await consumer.transport.lookup(source, "r", hashes(8), deadline_s=WAIT_S)
        fetching = asyncio.create_task(consumer.transport.fetch(offer, range(8), deadline_s=WAIT_S))
        async with asyncio.timeout(WAIT_S):
            await producer.faults.holding.wait()
        await producer.transport.use_keys((NEW,))
        with pytest.raises(PullError) as caught:
            await fetching
        assert caught.value.reason is PullReason.DISCONNECTED
        producer.faults.proceed.set()
        await until(lambda: set(consumer.store.usable) >= set(caught.value.quarantined))
        await until(lambda: producer.store.pins == {})


async def test_a_picker_s_orders_follow_the_key_too() -> None:
    orders = PrefetchOrders((OLD,), PATIENT)
    order = PrefetchOrder(("127.0.0.1", 1), "r", (), 5.0, tokens=(1, 2, 3))
    async with engine() as target:

        async def asked() -> PullReason:
            with pytest.raises(PullError) as caught:
                await orders.order(target.transport.address, order)
            return caught.value.reason

        assert await asked() is PullReason.PROTOCOL, "heard, by an engine that takes no orders"
        await target.transport.use_keys((NEW,))
        await until(lambda: orders._dialer.sessions == ())
        assert await asked() is PullReason.REFUSED_AUTH
        await orders.use_keys((NEW,))
        assert await asked() is PullReason.PROTOCOL
    await orders.stop()


async def _pull_in_spite_of_a_cut(consumer: Engine, producer: Engine) -> None:
    """A session that rested on a removed key ends a moment after the change, with the pulls in it, and the
    dialer then waits before it dials again, as after any loss."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(PullError):
                return await pull(consumer, producer)
            await asyncio.sleep(0.005)


async def test_the_mounted_file_is_enough(tmp_path: Path) -> None:
    """Both engines follow one file, as two pods follow one Secret: nobody is restarted."""
    file = tmp_path / "peer-key"
    file.write_bytes(OLD)
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        followers = [
            asyncio.create_task(follow(file, (OLD,), one.transport, every_s=0.01))
            for one in (producer, consumer)
        ]
        old = producer.transport.key_ids[0]
        for keys in ((OLD, NEW), (NEW, OLD), (NEW,)):
            fresh = tmp_path / "next"
            fresh.write_bytes(b"\n".join(keys))
            fresh.rename(file)
            wanted = PoolKeys(keys).ids()  # in their order
            await until(lambda: producer.transport.key_ids == wanted)  # noqa: B023
            await until(lambda: consumer.transport.key_ids == wanted)  # noqa: B023
            await _pull_in_spite_of_a_cut(consumer, producer)
        assert old not in producer.transport.key_ids
        for one in followers:
            one.cancel()


async def test_an_insecure_transport_takes_no_keys() -> None:
    async with engine(key=None) as plain:
        assert plain.transport.key_ids == ()
        with pytest.raises(ValueError, match="insecure"):
            await plain.transport.use_keys((NEW,))
