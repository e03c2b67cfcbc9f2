"""Rows of a snapshot until discovery names their endpoints: for a bounded time, and each for one use.

A row is for the endpoint of its name at the address at which the sibling heard it; the same name at
another address is another engine. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.adoption import ExportedView
from epp.siblings.wire import Row


@dataclass(slots=True)
class HoldingCounters:
    """What became of the rows; plain values for telemetry."""

    offered: int = 0  # handed to their endpoint's view
    moved: int = 0  # the endpoint has another address here
    expired: int = 0  # discovery did not name the endpoint in time


class HeldRows:
    """Of one snapshot. A second row of one endpoint is not kept."""

    def __init__(self, rows: Iterable[Row], until_s: float) -> None:
        self._until_s = until_s
        self._rows: dict[EndpointId, Row] = {}
        for row in rows:
            self._rows.setdefault(row.endpoint, row)
        self.counters = HoldingCounters()

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, endpoint: EndpointId, host: str, events_port: int, now_s: float) -> ExportedView | None:
        """The sibling's view of an endpoint that discovery has just named, if there is one."""
        self.expire(now_s)
        row = self._rows.pop(endpoint, None)
        if row is None:
            return None
        if (row.host, row.events_port) != (host, events_port):
            self.counters.moved += 1
            return None
        self.counters.offered += 1
        return row.view

    def expire(self, now_s: float) -> int:
        """Drop what nobody asked for in time; how many rows that were."""
        if now_s < self._until_s or not self._rows:
            return 0
        expired = len(self._rows)
        self.counters.expired += expired
        self._rows.clear()
        return expired
