"""What must be true before the fleet starts, each failure as one sentence with a way out.

Looks only: binds and closes sockets, reads /proc and the file system's size. Every check runs even
when an earlier one failed, so that a person sees all obstacles at once.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_MODULES = ("aiohttp", "grpc", "msgspec", "nixl_cu12", "numpy", "tokenizers", "yaml", "zmq")
_MAX_PORT = 65_535
_SHOWN = 3  # cases named in one sentence


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a fleet will use at most. `shm_bytes` is the part of it that lies in /dev/shm."""

    total_bytes: int
    shm_bytes: int


def check_all(listeners: Iterable[tuple[str, str, int]], memory: MemoryPlan) -> list[str]:
    """Sentences about what is missing; empty: the fleet may start."""
    return [*check_memory(memory), *check_listeners(listeners)]


def module_problem(names: Iterable[str] = _MODULES) -> str | None:
    """A sentence if packages are missing. Importing the rest would fail without them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"Python packages are missing: {', '.join(missing)}. Run `make demo` or `make up`, which"
        " install them, or start from the environment that they made (.venv)."
    )


def check_memory(
    plan: MemoryPlan, meminfo: Path = Path("/proc/meminfo"), shm: Path = Path("/dev/shm")
) -> Iterator[str]:
    available = _available_bytes(meminfo)
    if available is not None and available < plan.total_bytes:
        yield (
            f"Too little memory: the fleet plans {plan.total_bytes // _MIB} MiB and"
            f" {available // _MIB} MiB are available. Free some, or choose smaller tiers with"
            " --cpu-tier-tokens."
        )
    try:
        space = os.statvfs(shm)
    except OSError as error:
        yield f"{shm} cannot be used ({error.strerror}): the engines keep their CPU tier there."
        return
    free = space.f_bavail * space.f_frsize
    if free < plan.shm_bytes:
        yield (
            f"{shm} is too small: the CPU tiers need {plan.shm_bytes // _MIB} MiB and"
            f" {free // _MIB} MiB are free. Enlarge it (in a container: --shm-size), or choose smaller"
            " tiers with --cpu-tier-tokens."
        )


def _available_bytes(meminfo: Path) -> int | None:
    """MemAvailable, or None where the file does not say."""
    try:
        text = meminfo.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def check_listeners(listeners: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    """Try to bind each address. One sentence for each kind of obstacle, with the first few cases."""
    taken: list[str] = []
    missing_hosts: dict[str, None] = {}
    for part, host, port in listeners:
        where = f"{port} on {host} (needed for the {part})"
        if port > _MAX_PORT:
            yield f"There is no port {where}: choose a smaller --port-offset."
            continue
        error = bind_error(host, port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            taken.append(where)
        elif error.errno == errno.EADDRNOTAVAIL:
            missing_hosts[host] = None
        else:
            yield f"Port {where} cannot be used: {error.strerror}."
    if taken:
        yield (
            f"Taken by another process: port {_first_few(taken)}. Stop that process (a fleet that is still"
            " up?), or move this fleet with --port-offset (for example 100)."
        )
    if missing_hosts:
        yield (
            f"Not a local address: {_first_few(list(missing_hosts))}. Every address in 127.0.0.0/8 must be"
            " local, as it is on Linux; choose another block with --address-block."
        )


def _first_few(cases: list[str]) -> str:
    more = len(cases) - _SHOWN
    return ", ".join(cases[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def bind_error(host: str, port: int) -> OSError | None:
    """Why a server could not listen here, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None
