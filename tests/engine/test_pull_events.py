"""What the router learns of pulls from the engines' own events: which blocks a peer could serve now."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from engine_plugin.salt import published_salt
from tests.engine.pull_engines import BLOCK_TOKENS, KEY, PullEngine, fresh
from tests.engine.serving import connect, watching

pytestmark = pytest.mark.timeout(900)


async def test_pulled_blocks_are_claimed_for_both_tiers(source: PullEngine, consumer: PullEngine) -> None:
    ids, other = fresh(12), fresh(12)
    async with (
        watching(connect(source.url), KEY) as at_source,
        watching(connect(consumer.url), KEY) as at_consumer,
    ):
        await asyncio.to_thread(source.complete, ids)
        await asyncio.to_thread(source.complete, fresh(1))  # a step later its stores are over
        await at_source.until(lambda: at_source.depth(ids) == 12 and at_source.cpu_depth(ids) == 12)
        assert at_source.cpu_depth(other) == 0
        assert at_consumer.cpu_depth(ids) == 0
        await asyncio.to_thread(consumer.complete, ids, params=consumer.pull_from(source))
        await at_consumer.until(lambda: at_consumer.depth(ids) == 12 and at_consumer.cpu_depth(ids) == 12)
        assert at_consumer.cpu_depth([*ids[: 12 * BLOCK_TOKENS], *fresh(1)]) == 12
        assert at_consumer.cpu_depth(other) == 0


async def test_a_salt_does_not_leave_the_engine(source: PullEngine) -> None:
    ids, salt = list[int](), "a-tenant-s-secret-salt"
    engine = connect(source.url)
    context = zmq.asyncio.Context()
    listener = context.socket(zmq.SUB)
    listener.linger = 0
    listener.subscribe(b"")
    listener.connect(f"tcp://127.0.0.1:{engine.source.events_port}")
    heard = b""
    try:
        async with watching(engine, KEY) as view:
            while published_salt(KEY, salt).encode() not in heard:  # the subscription may come late
                ids = fresh(4)
                await asyncio.to_thread(source.complete, ids, salt=salt)
                await asyncio.to_thread(source.complete, fresh(1))  # a step later its stores are over
                while await listener.poll(1000):
                    heard += b"".join(await listener.recv_multipart())
            assert salt.encode() not in heard
            for secret in (salt.encode(), KEY):  # S-H01
                assert secret not in source.process.log.read_bytes()
            await view.until(lambda: view.cpu_depth(ids, salt=salt) == 4)
            assert view.cpu_depth(ids) == 0
            assert view.cpu_depth(ids, salt=published_salt(KEY, salt)) == 0
    finally:
        listener.close()
        context.term()


async def test_what_is_evicted_from_the_tier_is_claimed_no_longer(source: PullEngine) -> None:
    """The tier holds 1,024 blocks; what has come since the first prompt pushes it out."""
    ids = fresh(8)
    async with watching(connect(source.url), KEY) as view:
        await asyncio.to_thread(source.complete, ids)
        await asyncio.to_thread(source.complete, fresh(1))
        await view.until(lambda: view.cpu_depth(ids) == 8)
        for _ in range(6):
            await asyncio.to_thread(source.complete, fresh(200), tokens=1)
        await view.until(lambda: view.cpu_depth(ids) == 0)
