"""Endpoints that have just failed and are left alone for a while. Pure: clock and chance are arguments.

Without it every request pays again for one dead peer. The pause doubles with each failure in a row
and is spread by chance, so that sidecars do not come back all at once; the first success ends it.
Only failures that were *seen* count: no answer about a peer is not an answer against it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sidecar.endpoint import HostPort

FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
JITTER: Final = 0.25  # of the pause, in both directions
FORGET_AFTER_S: Final = 120.0  # without a new failure the next one is a first one
MAX_ENTRIES: Final = 1024


class Part(enum.StrEnum):
    """What an endpoint failed as; the same endpoint may be fine in its other part."""

    SOURCE = "source"
    PREFILLER = "prefiller"


@dataclass(slots=True)
class _Entry:
    pause_s: float
    until_s: float
    failed_s: float


class Suspects:
    """The table. `draw` gives a number in 0..1; the least recently failed entry goes when it is full."""

    def __init__(self, draw: Callable[[], float], *, max_entries: int = MAX_ENTRIES) -> None:
        self._draw = draw
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[Part, HostPort], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def failed(self, part: Part, peer: HostPort, now_s: float) -> None:
        """Leave `peer` alone from now on; failures during a pause (they were under way) do not add up."""
        entry = self._entries.get((part, peer))
        if entry is not None and now_s < entry.until_s:
            return
        pause_s = FIRST_PAUSE_S
        if entry is not None and now_s - entry.failed_s < FORGET_AFTER_S:
            pause_s = min(2 * entry.pause_s, MAX_PAUSE_S)
        spread = 1 + JITTER * (2 * self._draw() - 1)
        self._entries[part, peer] = _Entry(pause_s, now_s + pause_s * spread, now_s)
        self._entries.move_to_end((part, peer))
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def succeeded(self, part: Part, peer: HostPort) -> None:
        """Trust `peer` again."""
        self._entries.pop((part, peer), None)

    def has(self, part: Part, peer: HostPort, now_s: float) -> bool:
        """Whether `peer` is to be left alone now."""
        entry = self._entries.get((part, peer))
        return entry is not None and now_s < entry.until_s
