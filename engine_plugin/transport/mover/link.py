"""One mover process as the engine sees it: spawn, orders, reports, death. All on one loop.

What is asked of a mover ends with an answer or with the mover's death, never in silence. It is spawned
by exec (a fork would share NIXL's threads and sockets) with an environment that carries no secret.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_plugin import protocol
from engine_plugin.transport.mover import messages
from engine_plugin.transport.mover.windows import Windows

if TYPE_CHECKING:  # sessions of a picker come by here, and it has no numpy
    from engine_plugin.transport.tier_memory import TierMemory

_ENV_NAMES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ENV_PREFIXES = ("UCX_", "NIXL_")
_ENV_DEFAULTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


class MoverDown(Exception):
    """The mover is gone (or did not start)."""


@dataclass(slots=True)
class _Write:
    ended: asyncio.Future[messages.MoveEnded]
    on_chunks: Callable[[int], None]
    on_held: Callable[[], None]


class Mover:
    """A running mover. Create with `spawn`.

    Attributes:
        epoch: counts up with every mover of this transport.
        gone: resolved when the process has ended and its mapping with it.
    """

    def __init__(self, epoch: int, slots: int, process: subprocess.Popen[bytes], pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.pid = process.pid
        self.slots = slots
        self.agent = ""
        self.metadata = b""
        self.base_address = 0
        self.inbox = (0, 0)  # address, bytes
        self.windows = Windows(0)
        self.gone: asyncio.Future[int] = loop.create_future()
        self._loop = loop
        self._process = process
        self._pidfd = pidfd
        self._ready: asyncio.Future[None] = loop.create_future()
        self._writes: dict[str, _Write] = {}
        self._expected: dict[str, asyncio.Future[None]] = {}
        self._distrusted: set[str] = set()
        self._scattering: dict[str, asyncio.Future[None]] = {}
        self.heard_at_s = loop.time()
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        loop.add_reader(pidfd, self._reap)

    @classmethod
    async def spawn(cls, name: str, epoch: int, tier: TierMemory, *, deadline_s: float) -> Mover:
        """Start a mover under agent name `name#epoch` and wait until its agent is up.

        Must be called on a thread that outlives the mover (the transport's loop does): the kernel
        ends a process with the *thread* that spawned it. Exec takes the loop about 2 ms.

        Raises:
            MoverDown: it did not start within `deadline_s`; nothing of it is left.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as exc:
            raise MoverDown(f"cannot start the mover: {exc.strerror}") from exc
        try:
            process, pidfd = _spawn(
                _command(f"{name}#{epoch}", tier, theirs.fileno()), (theirs.fileno(), tier.fd)
            )
        except OSError as exc:
            ours.close()
            raise MoverDown(f"cannot start the mover: {exc.strerror}") from exc
        finally:
            theirs.close()
        mover = cls(epoch, tier.slots, process, pidfd)
        try:
            async with asyncio.timeout(deadline_s):
                await mover._attach(ours)
                await mover._ready
        except TimeoutError as exc:
            await mover.end(drain_s=0.0)
            raise MoverDown(f"the mover was not ready within {deadline_s:.1f} s") from exc
        except BaseException:
            await mover.end(drain_s=0.0)
            raise
        return mover

    def ask_alive(self) -> None:
        """Ask for a sign of life; `heard_at_s` tells whether any came."""
        self._order(messages.Alive())

    def kill(self) -> None:
        """End it at once, whatever it holds; `gone` resolves when it is dead."""
        if not self.gone.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wake(self) -> None:
        """A peer is told about this mover now and will connect."""
        self._order(messages.Wake())

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Let it write to a peer's mover."""
        self._order(messages.AddPeer(agent, metadata))

    def drop_peer(self, agent: str) -> None:
        """Undo one `add_peer`."""
        self._order(messages.DropPeer(agent))

    def write(
        self, order: messages.StartMove, on_chunks: Callable[[int], None], on_held: Callable[[], None]
    ) -> asyncio.Future[messages.MoveEnded]:
        """Write to a peer; the future always resolves (unsettled failure if this mover dies)."""
        ended: asyncio.Future[messages.MoveEnded] = self._loop.create_future()
        if self.gone.done():
            ended.set_result(messages.MoveEnded(order.tag, "failed", True, 0, "mover_down"))
            return ended
        self._writes[order.tag] = _Write(ended, on_chunks, on_held)
        self._order(order)
        return ended

    def writing(self, tag: str) -> bool:
        """Whether a write with this tag is unresolved."""
        return tag in self._writes

    def cancel(self, tag: str) -> None:
        """Stop a write; its future resolves when what was posted has."""
        if tag in self._writes:
            self._order(messages.CancelMove(tag))

    def proceed(self, tag: str) -> None:
        """Let a held write go on."""
        if tag in self._writes:
            self._order(messages.Proceed(tag))

    def expect(self, tag: str) -> asyncio.Future[None]:
        """A peer will write here; resolves with its notification, or is cancelled by `unexpect`."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._expected[tag] = arrived
        self._order(messages.Expect(tag))
        return arrived

    def scatter(self, tag: str, offset: int, slots: Sequence[int]) -> asyncio.Future[None]:
        """Put a packed move's blocks into their slots; resolves when they are there, and is cancelled by this
        mover's death. Until then the slots are being written."""
        done: asyncio.Future[None] = self._loop.create_future()
        if self.gone.done():
            done.cancel()
            return done
        self._scattering[tag] = done
        self._order(messages.Scatter(tag, offset, list(slots)))
        return done

    def distrust(self, tag: str) -> None:
        """That write is given up but not resolved: keep making progress, wait for it no longer."""
        if (arrived := self._expected.pop(tag, None)) is not None:
            arrived.cancel()
            self._distrusted.add(tag)

    def unexpect(self, tag: str) -> None:
        """That write is resolved; idempotent."""
        self.distrust(tag)
        if tag in self._distrusted:
            self._distrusted.discard(tag)
            self._order(messages.Unexpect(tag))

    async def finish_work(self, timeout_s: float) -> None:
        """Wait for what is under way, without what is distrusted."""
        work: list[asyncio.Future[messages.MoveEnded] | asyncio.Future[None]] = []
        work += (write.ended for write in self._writes.values())
        work += self._expected.values()
        if work:
            await asyncio.wait(work, timeout=timeout_s)

    async def end(self, *, drain_s: float) -> None:
        """Close the link, give what was posted `drain_s` to resolve, then kill; returns when dead."""
        if self._writer is not None:
            self._writer.close()
        if drain_s > 0 and not self.gone.done():
            await asyncio.wait({self.gone}, timeout=drain_s)
        self.kill()
        await asyncio.shield(self.gone)
        if self._reader_task is not None:
            await asyncio.wait({self._reader_task})

    async def _attach(self, link: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=link)
        self._reader_task = asyncio.create_task(self._read(reader), name=f"mover-{self.epoch}-reports")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(protocol.HEADER_BYTES)
                size = protocol.payload_bytes(header, messages.LINK_FRAME_BYTES)
                self._hear(messages.decode_report(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # its death is told by the pidfd
        except protocol.FrameError:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _hear(self, report: messages.AnyReport) -> None:
        self.heard_at_s = self._loop.time()
        match report:
            case messages.Ready():
                self._hear_ready(report)
            case messages.Wrote(tag=tag, chunks=chunks):
                if (write := self._writes.get(tag)) is not None:
                    write.on_chunks(chunks)
            case messages.Held(tag=tag):
                if (write := self._writes.get(tag)) is not None:
                    write.on_held()
            case messages.MoveEnded(tag=tag):
                if (write := self._writes.pop(tag, None)) is not None and not write.ended.done():
                    write.ended.set_result(report)
            case messages.Scattered(tag=tag):
                if (done := self._scattering.pop(tag, None)) is not None and not done.done():
                    done.set_result(None)
            case messages.Arrived(tag=tag):
                if (arrived := self._expected.pop(tag, None)) is not None and not arrived.done():
                    arrived.set_result(None)

    def _hear_ready(self, report: messages.Ready) -> None:
        self.agent, self.metadata, self.base_address = report.agent, report.metadata, report.base_address
        self.inbox = (report.inbox_address, report.inbox_bytes)
        self.windows = Windows(report.inbox_bytes)
        if not self._ready.done():
            self._ready.set_result(None)

    def _order(self, order: messages.Order) -> None:
        if self._writer is not None and not self.gone.done() and not self._writer.is_closing():
            self._writer.write(protocol.encode(order))

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        if self._writer is not None:
            self._writer.transport.abort()
        for tag, write in self._writes.items():
            if not write.ended.done():
                write.ended.set_result(messages.MoveEnded(tag, "failed", False, 0, "mover_down"))
        for awaited in (*self._expected.values(), *self._scattering.values()):
            awaited.cancel()
        self._writes.clear()
        self._expected.clear()
        self._scattering.clear()
        if not self._ready.done():
            self._ready.set_exception(MoverDown(f"the mover ended with status {code} before it was ready"))
            self._ready.exception()  # retrieved: spawn may have given up already
        self.gone.set_result(code)


def environment(source: dict[str, str]) -> dict[str, str]:
    """What a mover may see of the engine's environment: enough to run, no secret."""
    kept = {
        name: value for name, value in source.items() if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)
    }
    package_root = str(
        Path(__file__).resolve().parents[3]
    )  # where `engine_plugin` is, whatever the directory
    return _ENV_DEFAULTS | kept | {"PYTHONPATH": package_root, "PYTHONUNBUFFERED": "1"}


def _command(agent: str, tier: TierMemory, link_fd: int) -> list[str]:
    flags = {
        "--link-fd": link_fd,
        "--tier-fd": tier.fd,
        "--slots": tier.slots,
        "--slot-bytes": tier.slot_bytes,
        "--parent-pid": os.getpid(),
        "--agent": agent,
    }
    command = [sys.executable, "-m", "engine_plugin.transport.mover"]
    for flag, value in flags.items():
        command += [flag, str(value)]
    return command


def _spawn(command: list[str], fds: tuple[int, ...]) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        command,
        pass_fds=fds,
        env=environment(dict(os.environ)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
