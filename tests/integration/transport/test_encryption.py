"""The pool's key on the real control port: who has it pulls, who has not learns nothing and harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import replace

import pytest
from cryptography import x509

from engine_plugin import protocol
from engine_plugin.transport import PeerTransport, PullError, PullReason, TransportStats
from engine_plugin.transport.control import handshake as shake
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from tests.integration.transport.rig import KEY, PATIENT, WAIT_S, Engine, engine, hashes, identity, until
from tests.integration.transport.wiretap import wiretap

OTHER = b"fedcba9876543210fedcba9876543210"
SECRETIVE = {"model": "the-model-nobody-may-know", "seed_fp": "5eed5eed5eed5eed"}
REQUEST_ID = "decision-0815"


async def pull(consumer: Engine, source: tuple[str, int], count: int = 3) -> None:
    offer = await consumer.transport.lookup(source, REQUEST_ID, hashes(count), deadline_s=WAIT_S)
    assert (await consumer.transport.fetch(offer, range(count), deadline_s=WAIT_S)).blocks == count
    consumer.store.assert_blocks(hashes(count), range(count))


def told(producer: Engine, consumer: Engine, heard: bytes) -> list[str]:
    """What a listener on the line learns of both."""
    facts = {"hash": hashes(1)[0], "request": REQUEST_ID.encode(), "mover": b"metadata"}
    for name, side in (("producer", producer), ("consumer", consumer)):
        facts[f"{name} instance"] = side.identity.instance.encode()
    facts |= {name: value.encode() for name, value in SECRETIVE.items()}
    return sorted(name for name, fact in facts.items() if fact in heard)


async def test_a_listener_on_the_line_learns_nothing() -> None:
    async with (
        engine(**SECRETIVE) as producer,
        engine(**SECRETIVE) as consumer,
        wiretap(producer.transport.address) as tap,
    ):
        producer.store.put(hashes(3))
        await pull(consumer, tap.address)
        assert len(tap.heard) > 1000
        assert told(producer, consumer, bytes(tap.heard)) == []


async def test_the_same_listener_hears_everything_of_an_insecure_pair() -> None:
    """Negative control of the test above."""
    async with (
        engine(key=None, **SECRETIVE) as producer,
        engine(key=None, **SECRETIVE) as consumer,
        wiretap(producer.transport.address) as tap,
    ):
        producer.store.put(hashes(3))
        await pull(consumer, tap.address)
        everything = [
            "consumer instance",
            "hash",
            "model",
            "mover",
            "producer instance",
            "request",
            "seed_fp",
        ]
        assert told(producer, consumer, bytes(tap.heard)) == everything


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, OTHER), (KEY, None), (None, KEY)])
async def test_a_peer_without_the_key_is_refused_on_both_sides(
    ours: bytes | None, theirs: bytes | None
) -> None:
    async with engine(key=ours, **SECRETIVE) as producer, wiretap(producer.transport.address) as tap:
        stats = TransportStats()
        keys = None if theirs is None else PoolKeys((theirs,))
        with pytest.raises(PullError) as caught:
            await OutboundSession.connect(tap.address, Caller(identity(**SECRETIVE), keys, PATIENT, stats))
        if theirs is None:  # a TLS server hangs up on plain text: this side cannot know why
            assert caught.value.reason is PullReason.DISCONNECTED
        else:
            assert caught.value.reason is PullReason.REFUSED_AUTH
            assert [reason for _, reason in stats.refused] == ["auth"]
        if theirs == OTHER:  # it hangs up on seeing our certificate
            await until(lambda: producer.stats.handshakes_unfinished == 1)
        else:
            await until(lambda: producer.stats.refused == {("127.0.0.1", "auth"): 1})
        assert (producer.stats.mover_infos, producer.stats.sessions_in, producer.stats.bad_frames) == (
            0,
            0,
            0,
        )
        assert producer.identity.instance.encode() not in tap.heard
        assert (b"the-model" in tap.heard) == (theirs is None), "only what an insecure client says of itself"


async def test_a_recording_played_again_opens_nothing() -> None:
    async with (
        engine(limits=replace(PATIENT, handshake_s=1.0)) as producer,
        engine() as consumer,
        wiretap(producer.transport.address) as tap,
    ):
        producer.store.put(hashes(3))
        await pull(consumer, tap.address)
        lookups = producer.stats.lookups
        answer = await say(producer, bytes(tap.from_client))
        assert told(producer, consumer, answer) == []
        await until(lambda: producer.stats.refused == {("127.0.0.1", "auth"): 1})
        assert (producer.stats.lookups, producer.stats.sessions_in) == (lookups, 1)
        await pull(consumer, tap.address)


async def say(producer: Engine, raw: bytes) -> bytes:
    """Everything the producer answers to these bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection(*producer.transport.address)
    writer.write(raw)
    answer = b""
    async with asyncio.timeout(WAIT_S):
        try:
            while piece := await reader.read(1 << 16):
                answer += piece
        except ConnectionResetError:
            pass
    writer.close()
    return answer


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\0" * 64,
    b"\xff" * 64,
    b"\x16\x03\x01\xff\xff" + b"\0" * 64,  # a record longer than any
    b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",  # a hello that is too short
    b"\x17\x03\x03\x00\x10" + b"d" * 16,  # data before any handshake
    protocol.encode(shake.hello(identity())),
]


async def test_junk_instead_of_a_handshake_closes_that_connection_only() -> None:
    limits = replace(PATIENT, handshake_s=1.0)
    async with engine(limits=limits) as producer, engine() as consumer:
        producer.store.put(hashes(3))
        await pull(consumer, producer.transport.address)
        for junk in JUNK:
            answer = await say(producer, junk)
            assert len(answer) <= 7, "at most an alert"
        assert producer.stats.sessions_in == 1
        await pull(consumer, producer.transport.address)


async def test_a_handshake_cut_short_anywhere_ends_by_its_deadline() -> None:
    """Every prefix of a real client's bytes, left hanging."""
    limits = replace(PATIENT, handshake_s=0.5, handshakes=1000, handshakes_per_host=1000)
    async with (
        engine(limits=limits) as producer,
        engine() as consumer,
        wiretap(producer.transport.address) as tap,
    ):
        producer.store.put(hashes(3))
        await consumer.transport.connect(tap.address, deadline_s=WAIT_S)
        whole = bytes(tap.from_client)
        prefixes = [whole[:at] for at in range(1, len(whole), len(whole) // 20)]
        answers = await asyncio.gather(*(say(producer, prefix) for prefix in prefixes))
        assert all(producer.identity.instance.encode() not in answer for answer in answers)
        assert producer.stats.sessions_in == 1
        await pull(consumer, tap.address)


@pytest.mark.parametrize("role", ["client", "server"])
async def test_altered_bytes_end_the_session_and_nothing_else(role: str) -> None:
    """A frame changed, or slipped in, on the way."""
    async with engine() as producer, engine() as consumer, wiretap(producer.transport.address) as tap:
        producer.store.put(hashes(3))
        await pull(consumer, tap.address)
        forged = b"\x17\x03\x03\x00\x30" + b"\x5a" * 48
        near, far = sorted(tap._writers, key=lambda w: w.get_extra_info("sockname") != tap.address)
        (far if role == "client" else near).write(forged)
        await until(lambda: (producer.stats.sessions_in, consumer.stats.sessions_out) == (0, 0))
        assert (producer.stats.leases, producer.store.pins) == (0, {})
        await pull(consumer, tap.address)


async def test_an_older_tls_is_refused() -> None:
    async with engine() as producer:
        old = PoolKeys((KEY,))
        old.tls.client.minimum_version = old.tls.client.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(PullError):
            await OutboundSession.connect(
                producer.transport.address, Caller(identity(), old, PATIENT, TransportStats())
            )
        await until(lambda: producer.stats.refused == {("127.0.0.1", "auth"): 1})


async def test_a_client_without_a_certificate_hears_no_word() -> None:
    """It takes whatever certificate the server has, so its own half of TLS succeeds."""
    async with engine() as producer:
        anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(
            *producer.transport.address, ssl=anyone, server_hostname=""
        )
        seen = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.write(protocol.encode(shake.hello(identity())))
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert await reader.read(100) == b"", "closed without a word"
        writer.close()
        assert x509.load_der_x509_certificate(seen).subject.rfc4514_string() == "CN=kvpull pool"
        await until(lambda: producer.stats.refused == {("127.0.0.1", "auth"): 1})
        assert producer.stats.sessions_in == 0


async def test_without_a_key_only_by_name() -> None:
    async with engine() as peer:
        common = {"listen": ("127.0.0.1", 0), "identity": peer.identity, "tier": peer.store.tier}
        for wrong in ({}, {"keys": (KEY,), "insecure": True}):
            with pytest.raises(ValueError, match="insecure by name"):
                PeerTransport(**common, store=peer.store, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 16 bytes"):
            PeerTransport(**common, store=peer.store, keys=(b"short",))  # type: ignore[arg-type]


async def test_a_source_that_never_finishes_tls_is_a_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        async with engine(limits=replace(PATIENT, handshake_s=0.2)) as consumer:
            with pytest.raises(PullError) as caught:
                await consumer.transport.lookup(silent.getsockname(), "r", hashes(1), deadline_s=10)
            assert caught.value.reason is PullReason.TIMEOUT
