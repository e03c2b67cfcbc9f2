"""Numbers of endpoints in the block table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Slots:
    """Slot numbers, reused only after the last claim under them is gone."""

    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1
