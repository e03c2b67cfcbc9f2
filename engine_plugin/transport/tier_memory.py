"""The CPU tier: one slab in /dev/shm without a name, shared with the mover by descriptor.

The file never has a name (`O_TMPFILE`), so no kind of stop leaves one behind. Its pages are reserved
at creation: a /dev/shm that is too small is an error here and not a SIGBUS in the middle of a pull.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHM_DIR = "/dev/shm"


class TierMemoryError(OSError):
    """The slab cannot be created; the message names need and limit."""


class TierMemory:
    """`slots` equal slots of `slot_bytes` bytes each, writable by the engine and by its mover.

    Attributes:
        slots: number of slots.
        slot_bytes: size of one slot (one block).
        fd: descriptor of the slab; the mover inherits it. Owned by this object.
        array: uint8 view of shape (slots, slot_bytes).
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Map an existing slab; takes ownership of `fd`."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, slots * slot_bytes)
        flat: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.array: NDArray[np.uint8] = flat.reshape(slots, slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> TierMemory:
        """Reserve and map a zeroed slab.

        Raises:
            TierMemoryError: /dev/shm is missing or has not enough room.
        """
        if slots <= 0 or slot_bytes <= 0:
            raise ValueError(f"a tier needs slots and bytes, not {slots} x {slot_bytes}")
        need_bytes = slots * slot_bytes
        fd = -1
        try:
            fd = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(fd, 0, need_bytes)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
            raise TierMemoryError(exc.errno or errno.EIO, _explain(exc, need_bytes)) from exc
        return cls(fd, slots, slot_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the slab."""
        return self.slots * self.slot_bytes

    @property
    def base_address(self) -> int:
        """Address of slot 0 in this process."""
        return int(self.array.ctypes.data)

    def close(self) -> None:
        """Unmap and close; idempotent. Views the caller still holds keep the pages until they go."""
        if self._map is None:
            return
        mapping, self._map = self._map, None
        self.array = np.empty((0, self.slot_bytes), dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a caller's view is alive: the mapping ends with it
            mapping.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> TierMemory:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _explain(exc: OSError, need_bytes: int) -> str:
    need_mib = need_bytes / 2**20
    if exc.errno in (errno.ENOSPC, errno.ENOMEM):
        room = os.statvfs(SHM_DIR)
        free_mib = room.f_bavail * room.f_frsize / 2**20
        return f"the CPU tier needs {need_mib:.0f} MiB in {SHM_DIR}, which has {free_mib:.0f} MiB free"
    return f"cannot create a CPU tier of {need_mib:.0f} MiB in {SHM_DIR}: {exc.strerror}"
