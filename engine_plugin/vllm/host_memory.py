"""Whether this pod has room for the CPU tier, said at the start instead of by a SIGBUS or an OOM kill later.

Limits only, no free space: what is there already may be the tier itself, mapped by another process of this
engine.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path
from typing import Final

from engine_plugin.transport import TierMemoryError

SHM: Final = Path("/dev/shm")
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
RDMA_DEVICES: Final = Path("/dev/infiniband")
_MIB: Final = 1 << 20

log = logging.getLogger("vllm.kvpull")


def check_room(
    need_bytes: int, *, shm: Path = SHM, cgroup_limit: Path = CGROUP_LIMIT, rdma: Path = RDMA_DEVICES
) -> None:
    """Raises TierMemoryError, which names need and limit. A low memlock limit is a warning, and only where
    there is a device that pins memory: over TCP nothing is."""
    limits = {str(shm): _size_of(shm), f"the pod's memory limit ({cgroup_limit})": _number_in(cgroup_limit)}
    for name, limit in limits.items():
        if limit is not None and limit < need_bytes:
            raise TierMemoryError(
                f"cpu_bytes_to_use needs {need_bytes // _MIB} MiB and {name} has {limit // _MIB} MiB: "
                "raise it (an emptyDir with medium: Memory, the container's memory) or lower the tier; "
                "without the OffloadingConnector the engine serves with no CPU tier"
            )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if rdma.exists() and locked != resource.RLIM_INFINITY and locked < need_bytes:
        log.warning(
            "RDMA pins the CPU tier: it has %d MiB, and the memlock limit is %d KiB (IPC_LOCK lifts it)",
            need_bytes // _MIB,
            locked >> 10,
        )


def _size_of(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _number_in(file: Path) -> int | None:
    """None: no limit, or none that can be read."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
