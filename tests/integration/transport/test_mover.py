"""The mover process by itself: it ends with its engine, holds no secret, and failing to start is an error."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine_plugin.protocol import MoverInfo
from engine_plugin.transport import MoverDown
from tests.integration.transport.peer_process import peer_process
from tests.integration.transport.rig import PATIENT, engine, hashes, until


def gone(pid: int) -> bool:
    """Ended, or a zombie that only its dead parent's reaper has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


async def test_it_ends_when_its_engine_is_killed() -> None:
    async with peer_process(blocks=1, slots=4) as peer:
        peer.signal(signal.SIGKILL, mover=False)
        await peer.ended()
        await until(lambda: gone(peer.mover_pid))


async def test_it_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPULL_PEER_KEY", "the-secret-of-the-pool")
    async with engine(key=b"the-key-of-the-pool!") as peer:
        process = Path(f"/proc/{peer.transport.mover_pid}")
        seen = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        assert b"UCX_NET_DEVICES=lo" in seen
        assert b"secret" not in seen
        assert b"the-key" not in seen


async def test_it_shares_the_tier_and_no_other_file() -> None:
    async with engine() as peer:
        fds = f"/proc/{peer.transport.mover_pid}/fd"
        opened = {os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds)}
        tier = os.readlink(f"/proc/self/fd/{peer.store.tier.fd}")
        assert {name for name in opened if name.startswith("/dev/shm")} == {tier}
        assert tier.endswith("(deleted)")


async def test_a_transport_whose_mover_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(MoverDown, match="before it was ready"):
        async with engine():
            raise AssertionError("it must not start")


async def test_a_mover_that_takes_too_long_is_ended() -> None:
    with pytest.raises(MoverDown, match="not ready within"):
        async with engine(limits=replace(PATIENT, mover_start_s=0.01)):
            raise AssertionError("it must not start")


async def test_an_idle_engine_gets_a_new_mover_and_serves_again() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        for turn, victim in enumerate((consumer, producer)):
            assert victim.transport.mover_pid is not None
            os.kill(victim.transport.mover_pid, signal.SIGKILL)
            await until(lambda: victim.stats.mover_epoch == 2)  # noqa: B023
            offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
            slots = range(3 * turn, 3 * turn + 3)
            assert (await consumer.transport.fetch(offer, slots, deadline_s=10)).blocks == 3
            consumer.store.assert_blocks(hashes(3), slots)


async def test_a_hung_mover_is_replaced_and_serves_again() -> None:
    """A producer's mover that is stopped would cost every pull its patience, without end."""
    limits = replace(PATIENT, mover_silence_s=0.4)
    async with engine(limits=limits) as producer, engine() as consumer:
        producer.store.put(hashes(3))
        assert producer.transport.mover_pid is not None
        os.kill(producer.transport.mover_pid, signal.SIGSTOP)
        await until(lambda: producer.stats.mover_epoch == 2)
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        assert (await consumer.transport.fetch(offer, range(3), deadline_s=10)).blocks == 3
        consumer.store.assert_blocks(hashes(3), range(3))


async def test_a_loop_that_was_held_up_blames_neither_mover_nor_peer() -> None:
    """Seen: a process that did something else for some seconds killed its healthy mover."""
    limits = replace(PATIENT, mover_silence_s=0.4, ping_s=0.1, silence_s=0.4)
    async with engine(limits=limits) as producer, peer_process(blocks=3, slots=4) as source:
        await producer.transport.connect(source.address, deadline_s=30)
        time.sleep(1.0)  # noqa: ASYNC251 - holding the loop up is what is tested
        for _ in range(5):
            await asyncio.sleep(0)
        offer = await producer.transport.lookup(source.address, "r", hashes(3), deadline_s=30)
        assert (await producer.transport.fetch(offer, range(3), deadline_s=30)).blocks == 3
        assert (producer.stats.mover_epoch, producer.stats.sessions_out) == (1, 1)


async def test_a_failed_respawn_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for the new mover's link at that moment: an error, not the end of all pulls."""
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        refused: list[None] = []
        real = socket.socketpair

        def exhausted() -> tuple[socket.socket, socket.socket]:
            if not refused:
                refused.append(None)
                raise OSError(errno.EMFILE, "Too many open files")
            return real()

        monkeypatch.setattr(socket, "socketpair", exhausted)
        assert producer.transport.mover_pid is not None
        os.kill(producer.transport.mover_pid, signal.SIGKILL)
        await until(lambda: producer.stats.mover_epoch == 3)
        assert refused
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        assert (await consumer.transport.fetch(offer, range(3), deadline_s=10)).blocks == 3


async def test_a_mover_starts_from_any_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    async with engine() as peer:
        assert peer.transport.mover_pid is not None


async def test_an_impossible_memory_address_ends_that_session_and_no_mover() -> None:
    async with engine() as producer, engine() as consumer:
        producer.store.put(hashes(3))
        before = producer.transport.mover_pid
        session = await consumer.transport._dialer.session(producer.transport.address)
        info = MoverInfo(2, f"{consumer.identity.instance}-{consumer.identity.rank}#9", b"x", 2**64 - 1, 4)
        session._channel.send(info)
        await asyncio.wait_for(asyncio.shield(session.closed), 10)
        assert producer.stats.bad_frames == 1
        assert producer.transport.mover_pid == before
        offer = await consumer.transport.lookup(producer.transport.address, "r", hashes(3), deadline_s=10)
        assert (await consumer.transport.fetch(offer, range(3), deadline_s=10)).blocks == 3
