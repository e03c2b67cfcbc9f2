"""Requests that wait for room, in priority bands. Pure: no clock, no loop; `now_s` is an argument.

The highest band that has a request is served first, whatever waits below. In a band `fairness` chooses a
flow (requests with one fairness id) and `ordering` a request of it. Bounded by requests and by bytes, for
each band and for all together; every request leaves by being next, by expiry or by being withdrawn, and its
bytes leave with it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

OrderingKey: TypeAlias = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits. `expires_at_s` inf: it waits for ever."""

    number: int
    flow: str
    priority: int
    size_bytes: int
    arrived_s: float
    expires_at_s: float = math.inf
    slo_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlowHead:
    """First request of one flow, and where it stands by its band's ordering."""

    flow: str
    waiting: Waiting
    order: OrderingKey


class Fairness(Protocol):
    def choose(self, heads: Sequence[FlowHead], now_s: float) -> FlowHead:
        """One of `heads`, all of one band; never empty."""
        ...

    def served(self, flow: str, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request of the flow has ended, and took so much."""
        ...


class OrderingPolicy(Protocol):
    def key(self, waiting: Waiting) -> OrderingKey:
        """The smallest is first; unique."""
        ...


@dataclass(frozen=True, slots=True)
class BandSettings:
    """Limits and policies of one priority. Reference defaults."""

    fairness: Fairness
    ordering: OrderingPolicy
    max_bytes: int = 1_000_000_000
    max_requests: int = 5_000


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Of all bands together; None: no limit of their own."""

    max_bytes: int | None = None
    max_requests: int | None = None


class QueueFull(Exception):
    """No room for one more; the message names the limit."""


@dataclass(slots=True)
class _Band:
    settings: BandSettings
    flows: dict[str, list[tuple[OrderingKey, Waiting]]] = field(default_factory=dict)  # heaps
    requests: int = 0
    size_bytes: int = 0


class FlowQueue:
    """`len` is the number of requests that wait. A band exists while something waits in it."""

    def __init__(
        self,
        bands: Mapping[int, BandSettings],
        default: BandSettings,
        default_negative: BandSettings | None = None,
        limits: FlowLimits | None = None,
    ) -> None:
        """`bands` by priority; others have the settings of `default`, below 0 of `default_negative`."""
        self._settings = dict(bands)
        self._default = default
        self._default_negative = default_negative or default
        self._limits = limits or FlowLimits()
        self._bands: dict[int, _Band] = {}
        self._waiting: dict[int, Waiting] = {}  # by number; entries of the heaps that are not here have left
        self._expiries: list[tuple[float, int]] = []  # heap; the same
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def depths(self) -> dict[int, tuple[int, int]]:
        """Requests and bytes by priority."""
        return {priority: (band.requests, band.size_bytes) for priority, band in self._bands.items()}

    def settings_of(self, priority: int) -> BandSettings:
        default = self._default_negative if priority < 0 else self._default
        return self._settings.get(priority, default)

    def add(self, waiting: Waiting) -> None:
        """Raises QueueFull: nothing has changed."""
        settings = self.settings_of(waiting.priority)
        band = self._bands.get(waiting.priority) or _Band(settings)
        self._check_room(waiting, band)
        self._bands[waiting.priority] = band
        heap = band.flows.setdefault(waiting.flow, [])
        heapq.heappush(heap, (settings.ordering.key(waiting), waiting))
        self._count(waiting, band, 1)
        self._waiting[waiting.number] = waiting
        if waiting.expires_at_s != math.inf:
            heapq.heappush(self._expiries, (waiting.expires_at_s, waiting.number))

    def _check_room(self, waiting: Waiting, band: _Band) -> None:
        size, limits = waiting.size_bytes, self._limits
        if band.requests + 1 > band.settings.max_requests:
            raise QueueFull(f"priority {waiting.priority} has {band.requests} requests waiting")
        if band.size_bytes + size > band.settings.max_bytes:
            raise QueueFull(f"priority {waiting.priority} has {band.size_bytes} bytes waiting")
        if limits.max_requests is not None and len(self) + 1 > limits.max_requests:
            raise QueueFull(f"{len(self)} requests are waiting")
        if limits.max_bytes is not None and self._bytes + size > limits.max_bytes:
            raise QueueFull(f"{self._bytes} bytes are waiting")

    def _count(self, waiting: Waiting, band: _Band, sign: int) -> None:
        band.requests += sign
        band.size_bytes += sign * waiting.size_bytes
        self._bytes += sign * waiting.size_bytes

    def take_next(self, now_s: float) -> Waiting | None:
        """Mutates: the request whose turn it is leaves. None: nobody waits."""
        if not self._bands:
            return None
        priority = max(self._bands)
        band = self._bands[priority]
        heads = [FlowHead(flow, heap[0][1], heap[0][0]) for flow, heap in band.flows.items()]
        chosen = band.settings.fairness.choose(heads, now_s).waiting
        self.withdraw(chosen.number)
        return chosen

    def withdraw(self, number: int) -> bool:
        """Mutates: this request waits no longer. Idempotent: False if it did not."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return False
        band = self._bands[waiting.priority]
        self._count(waiting, band, -1)
        heap = band.flows[waiting.flow]
        while heap and heap[0][1].number not in self._waiting:
            heapq.heappop(heap)
        if not heap:
            del band.flows[waiting.flow]
        elif len(heap) > 64 and len(heap) > 2 * band.requests:  # mostly requests that have left
            heap[:] = [entry for entry in heap if entry[1].number in self._waiting]
            heapq.heapify(heap)
        if not band.requests:
            del self._bands[waiting.priority]
        return True

    def expire(self, now_s: float) -> list[Waiting]:
        """Mutates: who has waited too long leaves."""
        overdue = []
        while self._expiries and self._expiries[0][0] <= now_s:
            waiting = self._waiting.get(heapq.heappop(self._expiries)[1])
            if waiting is not None:
                self.withdraw(waiting.number)
                overdue.append(waiting)
        return overdue

    def check_integrity(self) -> None:
        """Recount everything. Raises AssertionError on a difference."""
        found = {
            entry[1].number: entry[1]
            for band in self._bands.values()
            for heap in band.flows.values()
            for entry in heap
            if entry[1].number in self._waiting
        }
        counted = sum(band.requests for band in self._bands.values())
        total = sum(waiting.size_bytes for waiting in found.values())
        if found != self._waiting or counted != len(found) or total != self._bytes:
            raise AssertionError(f"{len(self)} wait and {self._bytes} bytes, found {len(found)} and {total}")
