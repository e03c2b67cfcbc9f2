"""Which parts of a mover's inbox are in use (see `staging`). Kept by the engine: pure, without numpy."""

from __future__ import annotations


class Windows:
    """Of one inbox. First fit; offsets in bytes."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._used: dict[int, int] = {}  # offset -> size

    def take(self, size: int) -> int | None:
        """A free window of `size` bytes, if there is one."""
        at = 0
        for offset in sorted(self._used):
            if offset - at >= size:
                break
            at = offset + self._used[offset]
        if not 0 < size <= self._total_bytes - at:
            return None
        self._used[at] = size
        return at

    def give(self, offset: int) -> None:
        """Nothing can be written there any more; idempotent."""
        self._used.pop(offset, None)
