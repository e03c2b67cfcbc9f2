"""KV events on the event loop: applies what the receiving thread hands over, and runs replays.

Frames are decoded and applied in slices of at most 0.5 ms, so that a replay storm never holds up a
scheduling decision for longer than one batch takes. What a batch means is the sink's affair; when the
sink answers `ReplayNeeded`, the running replay of that endpoint (if any) is given up, its late frames
are thrown away by number, and a new one is asked for: at once, or after a back-off where the last
ones failed, with a bounded number at a time.

It must not interpret events, and keeps no cache state. Everything runs on the loop's thread except
the subscriber's thread, which only receives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.core.events import Batch, BatchResult, ReplayNeeded
from epp.kvevents.codec import decode_batch
from epp.kvevents.framing import CodecError, Message, split_live, split_replayed
from epp.kvevents.hand_over import HandOver, HandOverLimits
from epp.kvevents.link import (
    EventSource,
    LinkChanged,
    LiveFrames,
    Received,
    ReceiverFailed,
    ReplayEnded,
    ReplayFrames,
    SocketSettings,
)
from epp.kvevents.subscriber import Subscriber

log = logging.getLogger(__name__)

_REFUSALS = 8


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
class _Source:
    endpoint: EndpointId
    link: int
    source: EventSource
    counters: SourceCounters = field(default_factory=SourceCounters)
    replay: int | None = None  # number of the running one
    wanted_from: int | None = None  # replay that waits for its turn or its back-off
    started_s: float | None = None  # when the last replay began
    failures: int = 0  # in a row
    retry: asyncio.TimerHandle | None = None


class KvEventsManager:
    """One for all endpoints. `add_endpoint` and `remove_endpoint` work before and while `run` runs;
    the sink must know the endpoint first."""

    def __init__(
        self,
        sink: EventSink,
        settings: ManagerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        decode: Callable[[bytes], Batch] = decode_batch,
    ) -> None:
        self._sink = sink
        self._decode = decode
        self._settings = settings or ManagerSettings()
        self._clock = clock
        self._sources: dict[EndpointId, _Source] = {}
        self._by_replay: dict[int, _Source] = {}
        self._wanted: dict[EndpointId, _Source] = {}  # replays to start, in the order they were asked for
        self._numbers = 0  # of links and replays; never reused
        self._subscriber: Subscriber | None = None
        self._queue: HandOver[Received] | None = None

    # --- endpoints ------------------------------------------------------------------------------

    def add_endpoint(self, endpoint: EndpointId, source: EventSource) -> None:
        """Subscribe to an engine rank; adding it again with another address replaces the old one."""
        known = self._sources.get(endpoint)
        if known is not None:
            if known.source == source:
                return
            self.remove_endpoint(endpoint)
            self._sink.on_disconnect(endpoint, self._clock())  # no claim until the new address is heard
        entry = self._sources[endpoint] = _Source(endpoint, self._number(), source)
        if self._subscriber is not None:
            self._subscriber.add(endpoint, entry.link, source)

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Close the endpoint's sockets and forget it; idempotent. Late messages are thrown away."""
        entry = self._sources.pop(endpoint, None)
        if entry is None:
            return
        self._give_up_replay(entry)
        if self._subscriber is not None:
            self._subscriber.remove(entry.link)

    def counters(self, endpoint: EndpointId) -> SourceCounters:
        """Raises KeyError for an endpoint that was not added."""
        return self._sources[endpoint].counters

    def source(self, endpoint: EndpointId) -> EventSource | None:
        """Where the endpoint's events are heard; None for one that was not added."""
        entry = self._sources.get(endpoint)
        return None if entry is None else entry.source

    @property
    def backlog(self) -> int:
        """Messages received and not yet applied."""
        return 0 if self._queue is None else len(self._queue)

    @property
    def running_replays(self) -> int:
        return len(self._by_replay)

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Receive and apply until cancelled.

        Raises:
            RuntimeError: the receiving thread failed.
        """
        loop = asyncio.get_running_loop()
        self._queue = HandOver(loop, self._settings.hand_over, on_room=self._on_room)
        self._subscriber = Subscriber(self._queue, self._settings.sockets)
        try:
            self._subscriber.start()
            for entry in self._sources.values():
                self._subscriber.add(entry.endpoint, entry.link, entry.source)
            await self._pump(self._queue)
        finally:
            subscriber, self._subscriber = self._subscriber, None
            for entry in self._sources.values():
                self._give_up_replay(entry)
            await asyncio.shield(asyncio.to_thread(subscriber.stop))

    def _on_room(self) -> None:
        if self._subscriber is not None:
            self._subscriber.wake()
            self._start_replays()

    async def _pump(self, queue: HandOver[Received]) -> None:
        while True:
            await queue.ready.wait()
            end_s = self._clock() + self._settings.slice_s
            while (item := queue.take()) is not None:
                self._dispatch(item)
                if self._clock() >= end_s:
                    break
            await asyncio.sleep(0)

    def _dispatch(self, item: Received) -> None:
        if isinstance(item, LiveFrames):
            self._on_live(item)
        elif isinstance(item, ReplayFrames):
            self._on_replayed(item)
        elif isinstance(item, ReplayEnded):
            self._on_replay_ended(item)
        elif isinstance(item, LinkChanged):
            self._on_link(item)
        else:
            assert isinstance(item, ReceiverFailed)
            raise RuntimeError(f"the KV event thread failed: {item.reason}")

    # --- what was received ----------------------------------------------------------------------

    def _entry(self, endpoint: EndpointId, link: int) -> _Source | None:
        entry = self._sources.get(endpoint)
        return entry if entry is not None and entry.link == link else None

    def _on_link(self, item: LinkChanged) -> None:
        entry = self._entry(item.endpoint, item.link)
        if entry is None:
            return
        if item.up:
            entry.counters.connects += 1
            log.info("KV events of %s: subscribed", item.endpoint)
            self._follow(entry, self._sink.on_connect(item.endpoint, self._clock()))
        else:
            entry.counters.disconnects += 1
            log.warning("KV events of %s: disconnected", item.endpoint)
            self._give_up_replay(entry)
            entry.failures = 0
            self._follow(entry, self._sink.on_disconnect(item.endpoint, self._clock()))

    def _on_live(self, item: LiveFrames) -> None:
        entry = self._entry(item.endpoint, item.link)
        if entry is None:
            return
        entry.counters.live_messages += 1
        try:
            message = split_live(item.frames)
        except CodecError as error:
            self._malformed(entry, error)
            return
        self._apply(entry, message, replayed=False)

    def _on_replayed(self, item: ReplayFrames) -> None:
        entry = self._by_replay.get(item.replay)
        if entry is None:
            return  # a replay that was given up
        entry.counters.replayed_messages += 1
        try:
            message = split_replayed(item.frames)
        except CodecError as error:
            self._malformed(entry, error)
            return
        self._apply(entry, message, replayed=True)

    def _apply(self, entry: _Source, message: Message, replayed: bool) -> None:
        assert message.seq is not None  # the receiving thread keeps end markers to itself
        batch: Batch | None = None
        try:
            batch = self._decode(message.payload)
        except CodecError as error:
            if not entry.counters.undecodable_batches:
                log.warning("KV events of %s: batch %d is unreadable: %s", entry.endpoint, message.seq, error)
            entry.counters.undecodable_batches += 1
        answer = self._sink.on_batch(entry.endpoint, message.seq, batch, self._clock(), replayed)
        self._follow(entry, answer)

    def _malformed(self, entry: _Source, error: CodecError) -> None:
        if not entry.counters.malformed_messages:
            log.warning("KV events of %s: malformed message: %s", entry.endpoint, error)
        entry.counters.malformed_messages += 1
        entry.counters.malformed_reasons[error.reason] += 1

    # --- replays --------------------------------------------------------------------------------

    def _on_replay_ended(self, item: ReplayEnded) -> None:
        entry = self._by_replay.pop(item.replay, None)
        if entry is None:
            return
        entry.replay = None
        if item.reason == "cut":
            entry.counters.replays_cut += 1
            self._follow(entry, self._sink.on_replay_cut(entry.endpoint, self._clock()))
            self._start_replays()
            return
        if item.ok:
            entry.failures = 0
            entry.counters.replays_finished += 1
        else:
            entry.failures += 1
            entry.counters.replays_failed += 1
            log.warning("KV events of %s: replay failed: %s", entry.endpoint, item.reason)
        self._follow(entry, self._sink.on_replay_end(entry.endpoint, item.ok, self._clock()))
        self._start_replays()

    def _follow(self, entry: _Source, answer: BatchResult) -> None:
        if not entry.source.has_replay:
            # a sink that was told otherwise gives up after a few refusals and goes on without
            for _ in range(_REFUSALS):
                if not isinstance(answer, ReplayNeeded):
                    break
                answer = self._sink.on_replay_end(entry.endpoint, False, self._clock())
            return
        if not isinstance(answer, ReplayNeeded):
            return
        self._give_up_replay(entry)
        entry.wanted_from = answer.from_seq
        self._wanted[entry.endpoint] = entry
        delay_s = self._delay_s(entry)
        if delay_s > 0:
            entry.retry = asyncio.get_running_loop().call_later(delay_s, self._retry, entry)
        self._start_replays()

    def _delay_s(self, entry: _Source) -> float:
        settings = self._settings
        delay_s = 0.0
        if entry.failures:
            delay_s = min(settings.retry_first_s * 2.0 ** min(entry.failures - 1, 16), settings.retry_max_s)
        if entry.started_s is not None:
            delay_s = max(delay_s, entry.started_s + settings.replay_interval_s - self._clock())
        return delay_s

    def _retry(self, entry: _Source) -> None:
        entry.retry = None
        self._start_replays()

    def _start_replays(self) -> None:
        """As many of the wanted replays as may run, first asked first served; none while we are behind."""
        if self._subscriber is None or not self._wanted:
            return
        if self._queue is not None and not self._queue.has_room():
            return
        for entry in [e for e in self._wanted.values() if e.retry is None]:
            if len(self._by_replay) >= self._settings.concurrent_replays:
                return
            assert entry.wanted_from is not None
            entry.replay = self._number()
            self._by_replay[entry.replay] = entry
            entry.counters.replays_started += 1
            entry.started_s = self._clock()
            self._subscriber.replay(entry.replay, entry.source, entry.wanted_from)
            self._stop_wanting(entry)

    def _stop_wanting(self, entry: _Source) -> None:
        entry.wanted_from = None
        self._wanted.pop(entry.endpoint, None)
        if entry.retry is not None:
            entry.retry.cancel()
            entry.retry = None

    def _give_up_replay(self, entry: _Source) -> None:
        """The running or waiting replay of this endpoint is of no use any more."""
        self._stop_wanting(entry)
        if entry.replay is not None:
            self._by_replay.pop(entry.replay, None)
            if self._subscriber is not None:
                self._subscriber.cancel(entry.replay)
            entry.replay = None
            entry.counters.replays_given_up += 1
            self._start_replays()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
