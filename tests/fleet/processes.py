"""Looks at a process tree from outside, by identity, so that a reused pid cannot fool a test."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def descendants(pid: int) -> dict[int, str]:
    """Every process below `pid` with its command line."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            with contextlib.suppress(OSError):
                found[child] = (Path("/proc") / str(child) / "cmdline").read_text().replace("\0", " ")
                pending.append(child)
    return found


@contextlib.contextmanager
def watched(pids: dict[int, str]) -> Iterator[dict[int, str]]:
    """Descriptors of processes that are alive now, with their command lines."""
    fds: dict[int, str] = {}
    try:
        for pid, command in pids.items():
            with contextlib.suppress(ProcessLookupError):
                fds[os.pidfd_open(pid)] = command
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def still_alive(fds: dict[int, str], *, within_s: float) -> list[str]:
    """Command lines of those that have not ended within the time. A pidfd is readable from its end on."""
    waiting = dict(fds)
    deadline_s = time.monotonic() + within_s
    while waiting and time.monotonic() < deadline_s:
        for fd in select.select(list(waiting), [], [], 0.1)[0]:
            del waiting[fd]
    return list(waiting.values())


def shared_memory_files() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()}
