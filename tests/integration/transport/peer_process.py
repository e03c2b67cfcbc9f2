"""The handle a test has on a `peer_main` process: wait for its lines, stop it, continue it, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.integration.transport.rig import WAIT_S

ROOT = Path(__file__).resolve().parents[3]


class PeerProcess:
    """A producer process and its mover process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.mover_pid = 0
        self.address = ("127.0.0.1", 0)
        self.instance = ""

    async def heard(self, event: str) -> dict[str, Any]:
        """The next line, which must be of this event."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await self._process.stdout.readline()
        message: dict[str, Any] = json.loads(line)
        assert message["event"] == event
        return message

    async def state(self) -> dict[str, Any]:
        """Ask; whatever it says before the answer is not waited for any more."""
        assert self._process.stdout is not None
        self.write("state")
        async with asyncio.timeout(WAIT_S):
            while True:
                message: dict[str, Any] = json.loads(await self._process.stdout.readline())
                if message["event"] == "state":
                    self.mover_pid = message["mover"]
                    return message

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ready(self) -> None:
        message = await self.heard("ready")
        self.mover_pid = message["mover"]
        self.address = ("127.0.0.1", message["port"])
        self.instance = message["me"]

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def signal(self, number: signal.Signals, *, mover: bool = True) -> None:
        """To the engine, and to its mover unless told otherwise."""
        for pid in [self._process.pid] + [self.mover_pid] * mover:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def ended(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._process.wait()


@contextlib.asynccontextmanager
async def peer_process(**wanted: Any) -> AsyncIterator[PeerProcess]:
    """A ready producer process; gone, with its mover, at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.transport.peer_main",
        json.dumps(wanted),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    peer = PeerProcess(process)
    try:
        await peer.ready()
        yield peer
    finally:
        peer.signal(signal.SIGKILL)
        await peer.ended()
