"""Starts, watches and ends the processes of one fleet; leaves none behind, however it ends itself.

Each part gets its own process group (Ctrl-C reaches only us, and a part is ended with its children)
and `PR_SET_PDEATHSIG`, so that the kernel ends it when this process dies, SIGKILL included. Children
of a part that outlive it are handed to us by the kernel (we are their subreaper) and reaped here. It
must be driven from the main thread: the kernel ties the death signal to the thread that forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deploy.local.errors import FleetError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_READY_LINE_MAX_BYTES = 64 << 10
_LOG_TAIL_LINES = 12
_KILL_WAIT_S = 5.0
_POLL_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


class PartFailed(FleetError):
    """A part did not become ready, or ended by itself; the message shows its last log lines."""


class ReadyProbe(Protocol):
    """How to learn that a part without a ready pipe can serve."""

    async def __call__(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One process. With `probe` None it is given `--ready-fd N` and must write one JSON line to it."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    probe: ReadyProbe | None = None
    ready_timeout_s: float = 90.0  # a loaded machine takes long to import what a part needs
    stop_timeout_s: float = 5.0


@dataclass(slots=True)
class Part:
    """A started process. `expected_end` is set before we end it ourselves."""

    spec: PartSpec
    process: asyncio.subprocess.Process
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)
    expected_end: bool = False
    watcher: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.process.returncode is None


class Supervisor:
    """Owner of all parts of one fleet, by name, in start order."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._parts: dict[str, Part] = {}
        self._started: set[str] = set()  # a restarted part goes on in its log
        self._failed: asyncio.Future[PartFailed] = asyncio.get_running_loop().create_future()
        log_dir.mkdir(parents=True, exist_ok=True)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def pids(self) -> dict[str, int]:
        return {name: part.process.pid for name, part in self._parts.items() if part.running}

    async def start(self, spec: PartSpec) -> Part:
        """Start `spec` and wait until it is ready.

        Raises:
            PartFailed: it ended, or was not ready in time; it is not running afterwards.
        """
        part, ready_fd = await self._spawn(spec)
        try:
            async with asyncio.timeout(spec.ready_timeout_s):
                part.ready = await self._wait_ready(part, ready_fd)
        except TimeoutError:
            await self.stop(spec.name)
            raise PartFailed(
                f"{spec.name} was not ready after {spec.ready_timeout_s:.0f} s.{log_tail(part.log)}"
            ) from None
        except BaseException:
            await self.stop(spec.name)
            raise
        part.watcher = asyncio.create_task(self._watch(part), name=f"watch {spec.name}")
        return part

    async def stop(self, name: str) -> None:
        """End one part with its children: SIGTERM, a bounded wait, SIGKILL of its group."""
        part = self._parts.pop(name, None)
        if part is None:
            return
        part.expected_end = True
        if part.running:
            _signal_group(part, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(part.spec.stop_timeout_s):
                    await part.process.wait()
                    await _group_gone(part)  # vLLM's children clean up after the first process has ended
        await _kill_group(part)
        await _cancel(part.watcher)

    async def kill(self, name: str) -> None:
        """SIGKILL one part and its children, as a crashed pod would go; it is not a failure."""
        part = self._parts.pop(name)
        part.expected_end = True
        await _kill_group(part)
        await _cancel(part.watcher)

    async def stop_all(self) -> None:
        """End everything, last started first. Never raises for a part that is gone already."""
        for name in reversed(list(self._parts)):
            await self.stop(name)
        if not self._failed.done():
            self._failed.cancel()

    async def failure(self) -> PartFailed:
        """Wait until a part ends by itself, and say which."""
        return await asyncio.shield(self._failed)

    async def _spawn(self, spec: PartSpec) -> tuple[Part, int | None]:
        if spec.name in self._parts:
            raise FleetError(f"{spec.name} is running already")
        log = self._log_dir / f"{spec.name}.log"
        read_fd: int | None = None
        write_fd: int | None = None
        argv: Sequence[str] = spec.argv
        if spec.probe is None:
            read_fd, write_fd = os.pipe()
            argv = (*argv, "--ready-fd", str(write_fd))
        try:
            with open(log, "ab" if spec.name in self._started else "wb") as sink:  # noqa: ASYNC230  a local file, opened once a part
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    cwd=spec.cwd,
                    env={**os.environ, **spec.env},
                    pass_fds=() if write_fd is None else (write_fd,),
                    process_group=0,
                    preexec_fn=die_with_parent(os.getpid()),
                )
        except OSError as error:
            if read_fd is not None:
                os.close(read_fd)
            raise PartFailed(f"{spec.name} cannot be started: {error}") from error
        finally:
            if write_fd is not None:
                os.close(write_fd)
        part = Part(spec, process, log)
        self._parts[spec.name] = part
        self._started.add(spec.name)
        return part, read_fd

    async def _wait_ready(self, part: Part, ready_fd: int | None) -> dict[str, Any]:
        if ready_fd is not None:
            return await _read_ready_line(part, ready_fd)
        assert part.spec.probe is not None
        while part.running:
            if await part.spec.probe():
                return {"ready": True}
            await asyncio.sleep(_POLL_S)
        raise _ended(part, "before it was ready")

    async def _watch(self, part: Part) -> None:
        await part.process.wait()
        if not part.expected_end and not self._failed.done():
            self._failed.set_result(_ended(part, "by itself"))


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """What a child runs between fork and exec: ask the kernel to end it when `parent_pid` dies.

    The parent may have died before the request was made, hence the check behind it.
    """

    def ask_kernel() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)

    return ask_kernel


def log_tail(log: Path) -> str:
    """The last lines of a part's log, indented under a sentence."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        lines = []
    if not lines:
        return f" Its log {log} is empty."
    return f" Last lines of {log}:\n" + "\n".join(f"    {line}" for line in lines)


async def _read_ready_line(part: Part, ready_fd: int) -> dict[str, Any]:
    """One JSON object from the pipe. End of file without it means that the part has ended."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READY_LINE_MAX_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready_fd, "rb", 0)
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    if not line.endswith(b"\n"):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(part.process.wait(), _KILL_WAIT_S)
        raise _ended(part, "before it was ready")
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict) or message.get("ready") is not True:
        raise PartFailed(f"{part.spec.name} wrote something else than its ready line.{log_tail(part.log)}")
    return message


def _ended(part: Part, when: str) -> PartFailed:
    code = part.process.returncode
    how = "is ending" if code is None else f"ended with {_exit_text(code)}"
    return PartFailed(f"{part.spec.name} {how} {when}.{log_tail(part.log)}")


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _signal_group(part: Part, number: signal.Signals) -> None:
    """Signal the part's own process group; gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(part.process.pid, number)


async def _kill_group(part: Part) -> None:
    """SIGKILL what is left of the group and wait until the kernel has no member of it any more."""
    _signal_group(part, signal.SIGKILL)
    await part.process.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_WAIT_S):
            await _group_gone(part)


async def _group_gone(part: Part) -> None:
    while _group_alive(part.process.pid):  # noqa: ASYNC110  the kernel signals no group's end
        await asyncio.sleep(_POLL_S)


def _group_alive(group: int) -> bool:
    """Whether the group still has a member, after reaping orphans of it. The leader must be reaped."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # no orphan of this group is ours
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is None or task is asyncio.current_task():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
