"""Commands of the pages as a person pastes them: `kvpull` is this checkout's, `kubectl` the real one.

`kubectl port-forward` is the one that is played: a relay on loopback under a port of its own stands for it,
and later commands find the page's port there.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from deploy.local.spec import ROOT

_LOOPBACK = re.compile(r"127\.0\.0\.1:(\d+)")
Address = tuple[str, int]


async def paste(
    line: str, folder: Path = ROOT, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Exit status, and what was said on both streams."""
    kvpull_here = f'kvpull() {{ "{sys.executable}" -m epp.cli "$@"; }}; '
    process = await asyncio.create_subprocess_exec(
        *("bash", "-o", "pipefail", "-c", kvpull_here + line),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


@dataclass
class Desk:
    """A working directory, the names that the page leaves open, and the ports it has forwarded.

    `behind`: what `kubectl port-forward RESOURCE LOCAL:PORT` would reach, by resource and port.
    """

    folder: Path
    environment: Mapping[str, str]
    names: Mapping[str, str]
    behind: Mapping[tuple[str, int], Address]
    said: dict[str, tuple[int, str]] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _relays: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await self._stack.aclose()

    async def run(self, line: str, *more: str) -> tuple[int, str]:
        """A line of the page, with the names filled in and arguments that only a small fleet needs."""
        program, *arguments = shlex.split(line)
        if (program, arguments[0]) == ("kubectl", "port-forward"):
            self.said[line] = await self._forward(arguments)
        else:
            text = _LOOPBACK.sub(lambda found: f"127.0.0.1:{self._ports[found[1]]}", line)
            for name, value in self.names.items():
                text = text.replace(name, value)
            self.said[line] = await paste(" ".join([text, *more]), self.folder, self.environment)
        return self.said[line]

    async def _forward(self, arguments: list[str]) -> tuple[int, str]:
        resource, mapping = [a for a in arguments[1:] if "/" in a or a[0].isdigit()]
        local, port = mapping.split(":")
        target = self.behind[resource, int(port)]

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._relays.add(asyncio.create_task(_relay(reader, writer, target)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        await self._stack.enter_async_context(server)
        self._ports[local] = server.sockets[0].getsockname()[1]
        return 0, f"Forwarding from 127.0.0.1:{local} -> {port}"


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Address) -> None:
    """Bytes both ways until either side ends."""
    back: asyncio.StreamWriter | None = None
    try:
        there, back = await asyncio.open_connection(*target)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, back))
            both.create_task(_copy(there, writer))
    except OSError:
        pass  # the other side sees that it is closed
    finally:
        for end in (back, writer):
            if end is not None:
                end.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
