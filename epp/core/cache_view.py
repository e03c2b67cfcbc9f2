"""What the picker may claim about every engine's cache: event streams in front of one prefix index.

Life of an endpoint: `add_endpoint` -> `on_connect` (asks for a replay from 0) -> replayed and live
batches -> `on_replay_end` -> claims. A gap, an unreadable batch, a disconnect or a restart takes the
claim away until a replay has repaired the view or the view was dropped. Removing the endpoint drops
all of it.

Pure: no clock (`now_s` is an argument), no logging, no I/O. It decides nothing about placement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_plugin.identity import EndpointId
from epp.core.event_stream import EventStream, Step, StreamLimits
from epp.core.events import Applied, Batch, BatchResult, Buffered, ReplayNeeded, sum_applied
from epp.core.hashing import InvalidTokens
from epp.core.prefix_index import Depths, IndexStats, PrefixIndex, PrefixQuery
from epp.core.types import NO_MATCH, ClaimState, PrefixMatch, SchedulingRequest

_NO_DEPTHS = Depths()


@dataclass(slots=True)
class ViewCounters:
    """Totals of one endpoint since it was added; plain values for telemetry."""

    live_batches: int = 0
    replayed_batches: int = 0
    applied_batches: int = 0
    duplicate_batches: int = 0
    undecodable_batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0
    unresolved_blocks: int = 0
    skipped_blocks: int = 0
    unknown_events: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0  # asked for, with whatever reason
    failed_replays: int = 0
    clears: int = 0


@dataclass(frozen=True, slots=True)
class ViewStats:
    """One endpoint's cache view now."""

    state: ClaimState
    known_empty_start: bool
    index: IndexStats
    counters: ViewCounters
    held_batches: int  # waiting for a replay to end
    last_event_s: float | None  # when the last batch came, on the caller's clock

    @property
    def deaf(self) -> bool:
        """Traffic, but not one block applied: the engine speaks a form that we do not understand."""
        counters = self.counters
        idle = counters.stored_blocks == 0 and counters.removed_blocks == 0
        lost = counters.undecodable_batches + counters.unknown_events + counters.skipped_blocks
        return idle and lost > 0


@dataclass(slots=True)
class _View:
    stream: EventStream
    counters: ViewCounters = field(default_factory=ViewCounters)
    last_event_s: float | None = None


class CacheView:
    """Owns the index and one `EventStream` an endpoint. Calls for endpoints that were not added are
    harmless (events may still be on their way when one leaves): they change and claim nothing."""

    def __init__(self, index: PrefixIndex, limits: StreamLimits | None = None) -> None:
        self._index = index
        self._limits = limits or StreamLimits()
        self._views: dict[EndpointId, _View] = {}

    def add_endpoint(self, endpoint: EndpointId, has_replay: bool, model: str = "") -> None:
        """Start without a claim. `model` roots the keys of its blocks: give it where one picker
        serves several models; leave it out in a pool of one."""
        self._index.add_endpoint(endpoint, model)
        self._views[endpoint] = _View(EventStream(has_replay, self._limits))

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Forget the endpoint; idempotent."""
        if self._views.pop(endpoint, None) is not None:
            self._index.remove_endpoint(endpoint)

    # --- what the shell reports -----------------------------------------------------------------

    def on_connect(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        """The subscription is (again) in place. Normally answers with the replay to ask for."""
        view = self._views.get(endpoint)
        return Applied() if view is None else self._perform(endpoint, view, view.stream.on_connect())

    def on_disconnect(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        """The subscription is down: no claim until the same process has been heard again."""
        view = self._views.get(endpoint)
        return Applied() if view is None else self._perform(endpoint, view, view.stream.on_disconnect())

    def on_batch(
        self,
        endpoint: EndpointId,
        seq: int,
        batch: Batch | None,
        now_s: float,
        replayed: bool = False,
    ) -> BatchResult:
        """One message of the engine's stream, live or of the replay asked for last. None: it could
        not be decoded."""
        view = self._views.get(endpoint)
        if view is None:
            return Applied()
        counters = view.counters
        view.last_event_s = now_s
        if batch is None:
            counters.undecodable_batches += 1
        else:
            counters.unknown_events += batch.unknown_events
        if replayed:
            counters.replayed_batches += 1
            return self._perform(endpoint, view, view.stream.on_replayed(seq, batch))
        counters.live_batches += 1
        return self._perform(endpoint, view, view.stream.on_live(seq, batch))

    def on_replay_end(self, endpoint: EndpointId, ok: bool, now_s: float) -> BatchResult:
        """The replay asked for last has ended: `ok` if its end marker came."""
        view = self._views.get(endpoint)
        if view is None:
            return Applied()
        if not ok:
            view.counters.failed_replays += 1
        return self._perform(endpoint, view, view.stream.on_replay_end(ok))

    def _perform(self, endpoint: EndpointId, view: _View, step: Step) -> BatchResult:
        counters = view.counters
        if step.clear:
            counters.clears += 1
            self._index.clear(endpoint)
        applied = self._apply(endpoint, view, step)
        if step.replay is not None:
            _count_replay(counters, step.replay)
            return step.replay
        if step.held:
            return Buffered(view.stream.held_batches)
        return applied

    def _apply(self, endpoint: EndpointId, view: _View, step: Step) -> Applied:
        if step.duplicate:
            view.counters.duplicate_batches += 1
            return Applied(duplicate=True)
        if not step.apply:
            return Applied()
        parts = [self._index.apply_batch(endpoint, batch) for batch in step.apply]
        applied = parts[0] if len(parts) == 1 else sum_applied(parts)
        counters = view.counters
        counters.applied_batches += len(parts)
        counters.stored_blocks += applied.stored_blocks
        counters.removed_blocks += applied.removed_blocks
        counters.orphan_blocks += applied.orphan_blocks
        counters.unresolved_blocks += applied.unresolved_blocks
        counters.skipped_blocks += applied.skipped_blocks
        if applied.stored_blocks:
            view.stream.on_resolved_store()
        return applied

    # --- what the picker asks -------------------------------------------------------------------

    def match(
        self, request: SchedulingRequest, endpoints: Iterable[EndpointId]
    ) -> dict[EndpointId, PrefixMatch]:
        """How much of the prompt each endpoint holds. An endpoint without a claim, or that we do not
        know, has `state.has_claim` False; a prompt without exact tokens matches nothing anywhere."""
        views = {endpoint: self._views.get(endpoint) for endpoint in endpoints}
        claiming = [e for e, view in views.items() if view is not None and view.stream.state.has_claim]
        depths = self._depths(request, claiming)
        matches: dict[EndpointId, PrefixMatch] = {}
        for endpoint, view in views.items():
            if view is None:
                matches[endpoint] = NO_MATCH
                continue
            stream = view.stream
            found = depths.get(endpoint, _NO_DEPTHS)
            matches[endpoint] = PrefixMatch(
                state=stream.state,
                blocks=found.blocks,
                device_blocks=found.device_blocks,
                cpu_blocks=found.cpu_blocks,
                block_size_tokens=self._index.block_size_tokens(endpoint),
                known_empty_start=stream.known_empty_start,
            )
        return matches

    def _depths(self, request: SchedulingRequest, endpoints: list[EndpointId]) -> dict[EndpointId, Depths]:
        if request.token_ids is None or not endpoints:
            return {}
        query = PrefixQuery(request.token_ids, request.lora_name, request.cache_salt)
        try:
            return self._index.depths(query, endpoints)
        except InvalidTokens:  # ids that no engine could have: missing cache data is "no match"
            return {}

    def state(self, endpoint: EndpointId) -> ClaimState:
        """UNKNOWN for endpoints that were not added."""
        view = self._views.get(endpoint)
        return ClaimState.UNKNOWN if view is None else view.stream.state

    def stats(self, endpoint: EndpointId) -> ViewStats:
        """Raises KeyError for an endpoint that was not added."""
        view = self._views[endpoint]
        return ViewStats(
            state=view.stream.state,
            known_empty_start=view.stream.known_empty_start,
            index=self._index.stats(endpoint),
            counters=view.counters,
            held_batches=view.stream.held_batches,
            last_event_s=view.last_event_s,
        )


def _count_replay(counters: ViewCounters, replay: ReplayNeeded) -> None:
    counters.replays += 1
    if replay.reason == "gap":
        counters.gaps += 1
    elif replay.reason == "restart":
        counters.restarts += 1
