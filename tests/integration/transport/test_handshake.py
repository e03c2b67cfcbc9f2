"""Who may pull: keys, identities, limits, and bytes that are not ours, on the real control port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from engine_plugin import protocol
from engine_plugin.identity import COMPARED_FIELDS
from engine_plugin.transport import PeerIdentity, PullError, PullReason, TransportStats
from engine_plugin.transport.control import handshake as shake
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.channel import Channel, dial
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from tests.integration.transport.rig import KEY, PATIENT, WAIT_S, Engine, engine, hashes, identity, until


def plain(**settings: Any) -> AbstractAsyncContextManager[Engine]:
    """An insecure engine: what is said to it below is then all that protects it."""
    return engine(key=None, **settings)


def caller(who: PeerIdentity, key: bytes | None, stats: TransportStats) -> Caller:
    return Caller(who, None if key is None else PoolKeys((key,)), PATIENT, stats)


async def refused(consumer: Engine, producer: Engine) -> PullError:
    producer.store.put(hashes(2))
    with pytest.raises(PullError) as caught:
        await consumer.transport.lookup(producer.transport.address, "r", hashes(2), deadline_s=10)
    await until(lambda: bool(producer.stats.refused))
    assert producer.stats.mover_infos == 0
    assert producer.stats.sessions_in == 0
    assert producer.stats.lookups == 0
    return caught.value


MISMATCHES: dict[str, Any] = {
    "model": "other",
    "revision": "r2",
    "block_size_tokens": 32,
    "block_bytes": 4096,
    "dtype": "float16",
    "layout": "nhd",
    "tp_size": 2,
    "hash_algo": "sha256",
    "seed_fp": "ff00",
}


@pytest.mark.parametrize("key", [None, KEY])
async def test_a_mismatch_is_named_on_both_sides(key: bytes | None) -> None:
    """Every field, with the consumer's own half of the handshake (which needs no mover)."""
    assert set(MISMATCHES) == set(COMPARED_FIELDS)
    async with engine(key=key) as producer:
        us = producer.identity.instance
        wanted = MISMATCHES | {"instance": us}
        for field, value in wanted.items():
            who, stats = identity(**{field: value}), TransportStats()
            with pytest.raises(PullError) as caught:
                await OutboundSession.connect(producer.transport.address, caller(who, key, stats))
            assert (caught.value.reason, caught.value.detail) == (PullReason.REFUSED_IDENTITY, field)
            assert stats.refused == {(us, field): 1}
            await until(lambda: producer.stats.refused[(who.instance, field)] == 1)  # noqa: B023
        assert producer.stats.refused.total() == len(wanted)
        assert (producer.stats.mover_infos, producer.stats.sessions_in) == (0, 0)


async def test_a_mismatch_reaches_the_engine_as_a_reason() -> None:
    async with engine() as producer, engine(seed_fp="ff00") as consumer:
        error = await refused(consumer, producer)
        assert (error.reason, error.detail) == (PullReason.REFUSED_IDENTITY, "seed_fp")
        assert consumer.stats.refused == {(producer.identity.instance, "seed_fp"): 1}
        assert producer.stats.refused == {(consumer.identity.instance, "seed_fp"): 1}
        assert consumer.stats.pulls == {"refused_identity": 1}


async def test_another_version_is_refused_by_name() -> None:
    async with plain() as producer:
        newer = protocol.Hello(protocol.MAGIC, protocol.VERSION + 1, identity())
        reader, writer = await asyncio.open_connection(*producer.transport.address)
        writer.write(protocol.encode(newer))
        async with asyncio.timeout(WAIT_S):
            received = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b"refused" in received
        assert producer.stats.refused == {("127.0.0.1", "protocol"): 1}


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xff\xff\xff" + b"\0" * 100,
    b"\x7f\xff\xff\xff",
    b"\0\0\0\0",
    b"\0\0\0\x05\xc1\xc1\xc1\xc1\xc1",
    protocol.encode(protocol.Ping()),
    protocol.encode(protocol.MoverInfo(1, "a", b"x", 0, 1)),
    protocol.encode(protocol.Lookup(1, "r", [b"12345678"])),
    b"\0\0\x10\0" + b"\x91" * 4096,
]


async def test_what_is_not_ours_closes_that_connection_only() -> None:
    async with plain() as producer, plain() as consumer:
        producer.store.put(hashes(3))
        for count, junk in enumerate(JUNK, start=1):
            offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
            reader, writer = await asyncio.open_connection(*producer.transport.address)
            writer.write(junk)
            async with asyncio.timeout(WAIT_S):
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            assert producer.stats.bad_frames == count
            consumer.store.tier.array[:] = 0
            assert (await consumer.transport.fetch(offer, range(3), deadline_s=10)).blocks == 3
            consumer.store.assert_blocks(hashes(3), range(3))
        assert (producer.stats.sessions_in, producer.stats.mover_infos) == (1, 1)


async def test_a_bad_frame_after_the_handshake_frees_what_the_session_held() -> None:
    async with plain() as producer:
        producer.store.put(hashes(3))
        reader, writer = await asyncio.open_connection(*producer.transport.address)
        for message in (shake.hello(identity()), protocol.Lookup(1, "r", hashes(3))):
            writer.write(protocol.encode(message))
        await until(lambda: producer.stats.leases == 1)
        writer.write(b"\0\0\0\x03abc")
        async with asyncio.timeout(WAIT_S):
            await reader.read()
        writer.close()
        await writer.wait_closed()
        await until(lambda: producer.stats.sessions_in == 0)
        assert (producer.stats.leases, producer.store.pins) == (0, {})


async def test_lookups_taken_back_in_the_same_breath_use_nothing_up() -> None:
    async with plain(limits=replace(PATIENT, leases=2)) as producer:
        producer.store.put(hashes(3))
        reader, writer = await asyncio.open_connection(*producer.transport.address)
        burst: list[protocol.Message] = [shake.hello(identity())]
        for at in range(100):
            burst += [protocol.Lookup(at, "r", hashes(3)), protocol.Cancel(at)]
        writer.write(b"".join(map(protocol.encode, burst)))
        async with asyncio.timeout(WAIT_S):
            for at in range(1000, 2000):
                writer.write(protocol.encode(protocol.Lookup(at, "r", hashes(3))))
                answer = await answer_to(at, reader)
                if isinstance(answer, protocol.Found):
                    break
        assert isinstance(answer, protocol.Found)
        writer.close()
        await writer.wait_closed()
        await until(lambda: producer.stats.leases == 0)
        assert producer.store.pins == {}


async def answer_to(request_id: int, reader: asyncio.StreamReader) -> protocol.ServerMessage:
    while True:
        size = int.from_bytes(await reader.readexactly(4), "big")
        message = protocol.decode_server(await reader.readexactly(size))
        if getattr(message, "id", None) == request_id:
            return message


async def test_an_unfinished_handshake_is_cut_off() -> None:
    async with engine(limits=replace(PATIENT, handshake_s=0.2)) as producer:
        with socket.create_connection(producer.transport.address) as silent:
            silent.setblocking(False)
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""


@pytest.mark.parametrize("limit", ["connections", "handshakes", "handshakes_per_host"])
async def test_too_many_connections_are_closed_at_once(limit: str) -> None:
    bound = 0 if limit == "connections" else 2
    async with engine(limits=replace(PATIENT, **{limit: bound})) as producer:
        loop = asyncio.get_running_loop()
        first, second, third = (socket.create_connection(producer.transport.address) for _ in range(3))
        with first, second, third:
            third.setblocking(False)
            try:
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(third, 1) == b""
            except ConnectionResetError:
                pass
            assert producer.stats.refused[("other", "limit")] == (3 if bound == 0 else 1)


@pytest.mark.parametrize("server_side", [True, False])
async def test_no_message_waits_for_an_acknowledgement(server_side: bool) -> None:
    """Seen: every pull took 40 ms more, as accepted sockets did not have Nagle's algorithm off."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        far = await dial(listening.getsockname(), "")
        near, _ = await loop.sock_accept(listening)
        kept, other = (near, far) if server_side else (far, near)
        channel = await Channel.open(kept, None, server_side=server_side, send_limit_bytes=1 << 20)
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        channel.abort()
        other.close()
