"""Public failure reports of peer transfers (S-E..) that no other test shows; all: docs/engine-plugin.md."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine_plugin.protocol import Declined
from engine_plugin.transport import PullError, TransportStats
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from tests.integration.transport.rig import KEY, PATIENT, WAIT_S, engine, hashes, until


async def test_e03_a_thousand_look_ups_given_up_at_a_mute_source() -> None:
    """Nothing of them is left at either end, and a pull afterwards brings its blocks."""
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(4))
        producer.faults.stall_lookup = True
        source = producer.transport.address
        await consumer.transport.connect(source, deadline_s=WAIT_S)
        for first in range(0, 1000, 50):
            asking = [
                asyncio.create_task(consumer.transport.lookup(source, f"r{at}", hashes(4), deadline_s=WAIT_S))
                for at in range(first, first + 50)
            ]
            await asyncio.sleep(0)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        producer.faults.stall_lookup = False
        producer.faults.proceed.set()
        offer = await consumer.transport.lookup(source, "last", hashes(4), deadline_s=WAIT_S)
        assert (await consumer.transport.fetch(offer, range(4), deadline_s=WAIT_S)).blocks == 4
        await until(lambda: (producer.stats.leases, producer.store.pins) == (0, {}))
        assert consumer.stats.quarantined_slots == 0


async def test_e04_a_lease_is_good_for_the_session_that_was_given_it() -> None:
    """Another peer that has come to know its name gets a refusal, and not a byte."""
    async with engine() as producer, engine() as consumer, engine() as thief:
        producer.store.put(hashes(3))
        source = producer.transport.address
        offer = await consumer.transport.lookup(source, "mine", hashes(3), deadline_s=WAIT_S)
        stolen = consumer.transport._consumer._offers[offer.offer_id].lease_id
        stats = TransportStats()
        caller = Caller(thief.identity, PoolKeys((KEY,)), PATIENT, stats)
        session = await OutboundSession.connect(source, caller)
        mover = thief.transport._movers.current
        assert mover is not None
        call = session.move(stolen, mover, (0, 1, 2), offer.generations, 5.0)
        async with asyncio.timeout(WAIT_S):
            ended = await call.ended
        assert isinstance(ended, Declined)
        assert ended.reason == "stale"
        assert not thief.store.tier.array.any()
        assert (await consumer.transport.fetch(offer, range(3), deadline_s=WAIT_S)).blocks == 3
        await session.close()


async def test_e15_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with engine(listen=("::1", 0)) as producer, engine(listen=("::1", 0)) as consumer:
        producer.store.put(hashes(3))
        assert producer.transport.address[0] == "::1"
        offer = await consumer.transport.lookup(
            producer.transport.address, "six", hashes(3), deadline_s=WAIT_S
        )
        assert (await consumer.transport.fetch(offer, range(3), deadline_s=WAIT_S)).blocks == 3
        consumer.store.assert_blocks(hashes(3), range(3))


async def test_e20_a_time_out_is_not_an_absence() -> None:
    """The look-up that timed out is asked again, and finds what was there all along."""
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        producer.faults.stall_lookup = True
        source = producer.transport.address
        with pytest.raises(PullError) as caught:
            await consumer.transport.lookup(source, "first", hashes(3), deadline_s=0.2)
        assert caught.value.reason.value == "timeout"
        producer.faults.stall_lookup = False
        producer.faults.proceed.set()
        reasons = set[str]()
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    offer = await consumer.transport.lookup(source, "second", hashes(3), deadline_s=WAIT_S)
                    break
                except PullError as error:  # the source is left alone for a moment, under the same reason
                    reasons.add(error.reason.value)
                    await asyncio.sleep(0.01)
        assert reasons <= {"timeout"}
        assert offer.hit_blocks == 3
        consumer.transport.abandon(offer)
