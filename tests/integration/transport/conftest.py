"""NIXL over loopback TCP only, and nothing left behind: checked around every test here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.transport.rig import until


def movers() -> set[int]:
    """Mover processes of this process."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(status.parent.name), status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(rest[1]) == os.getpid() and rest[0] != "Z":
            found.add(pid)
    return found


@pytest.fixture(autouse=True)
async def nothing_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    children, shm = movers(), set(os.listdir("/dev/shm"))
    fds = len(os.listdir("/proc/self/fd"))
    yield
    await until(lambda: movers() <= children)
    assert {name for name in os.listdir("/dev/shm") if "kv" in name or "mover" in name} <= shm
    await until(lambda: len(os.listdir("/proc/self/fd")) <= fds)
