"""What the event intake keeps of each engine it follows, its bounds, and where events go. Plain values.

What happens to them is the manager's affair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.core.events import Batch, BatchResult
from epp.kvevents.hand_over import HandOverLimits
from epp.kvevents.link import EventSource, SocketSettings


class EventSink(Protocol):
    """Where events go: `EndpointPicker`, by way of `CacheView`. Called on the loop; never awaits."""

    def on_connect(self, endpoint: EndpointId, now_s: float) -> BatchResult: ...

    def on_disconnect(self, endpoint: EndpointId, now_s: float) -> BatchResult: ...

    def on_batch(
        self,
        endpoint: EndpointId,
        seq: int,
        batch: Batch | None,
        now_s: float,
        replayed: bool = False,
    ) -> BatchResult: ...

    def on_replay_end(self, endpoint: EndpointId, ok: bool, now_s: float) -> BatchResult: ...

    def on_replay_cut(self, endpoint: EndpointId, now_s: float) -> BatchResult: ...


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Bounds of the event intake."""

    slice_s: float = 0.0005  # longest stretch on the loop, give or take one batch
    concurrent_replays: int = 4
    replay_interval_s: float = 0.05  # between two replays of one endpoint, whatever it does
    retry_first_s: float = 0.2  # after the first failed replay of an endpoint; doubles
    retry_max_s: float = 15.0
    hand_over: HandOverLimits = field(default_factory=HandOverLimits)
    sockets: SocketSettings = field(default_factory=SocketSettings)


@dataclass(slots=True)
class SourceCounters:
    """Totals of one endpoint since it was added; plain values for telemetry."""

    live_messages: int = 0
    replayed_messages: int = 0
    malformed_messages: int = 0  # frames that are no message: no sequence, so not even a gap
    malformed_reasons: Counter[str] = field(default_factory=Counter)
    undecodable_batches: int = 0  # live and replayed
    connects: int = 0
    disconnects: int = 0
    replays_started: int = 0
    replays_finished: int = 0
    replays_failed: int = 0
    replays_cut: int = 0  # more came than could be kept; asked for again from where they got to
    replays_given_up: int = 0  # overtaken by a newer one, or the endpoint left

    @property
    def unusable(self) -> bool:
        """Messages come, and not one of them could be read (case S-C17)."""
        messages = self.live_messages + self.replayed_messages
        return 0 < messages == self.malformed_messages + self.undecodable_batches


@dataclass(slots=True)
class FollowedSource:
    endpoint: EndpointId
    link: int
    source: EventSource
    counters: SourceCounters = field(default_factory=SourceCounters)
    replay: int | None = None  # number of the running one
    wanted_from: int | None = None  # replay that waits for its turn or its back-off
    started_s: float | None = None  # when the last replay began
    failures: int = 0  # in a row
    retry: asyncio.TimerHandle | None = None
