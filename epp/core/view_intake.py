"""How a cache view changes: endpoints, what the shell reports of their streams, other signs than events, and
views taken over from siblings.

Pure: no clock (`now_s` is an argument), no logging, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine_plugin.identity import EndpointId
from epp.core.adoption import AdoptionRefused, ExportedView, Overlap
from epp.core.event_stream import EventStream
from epp.core.events import Applied, Batch, BatchResult, Buffered, sum_applied
from epp.core.index_dump import DumpRefused
from epp.core.prefix_index import PrefixIndex
from epp.core.speculation import SpeculationSettings, SpeculativeEntries
from epp.core.stream_step import Step, StreamLimits
from epp.core.view_state import View

MAX_PULL_MISSES = 3  # one or two can be blocks that were evicted while the pull was on its way


class ViewIntake:
    """The writing half of `cache_view.CacheView`. Calls for endpoints that were not added are
    harmless (events may still be on their way when one leaves): they change and claim nothing."""

    def __init__(
        self,
        index: PrefixIndex,
        limits: StreamLimits | None = None,
        speculation: SpeculationSettings | None = None,
        salt_key: bytes | None = None,
    ) -> None:
        """`speculation` None: only what engines reported counts. `salt_key`: the pool's, where engines
        publish salts as keyed digests (`engine_plugin.salt`); salts that other engines publish in clear
        go on matching."""
        self._index = index
        self._speculative = SpeculativeEntries(speculation) if speculation else None
        self._salt_key = salt_key
        self._limits = limits or StreamLimits()
        self._views: dict[EndpointId, View] = {}

    def add_endpoint(self, endpoint: EndpointId, has_replay: bool, model: str = "") -> None:
        """Start without a claim. `model` roots the keys of its blocks: give it where one picker
        serves several models; leave it out in a pool of one."""
        self._index.add_endpoint(endpoint, model)
        self._forget_speculation(endpoint)
        self._views[endpoint] = View(EventStream(has_replay, self._limits), model)

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Forget the endpoint; idempotent."""
        if self._views.pop(endpoint, None) is not None:
            self._index.remove_endpoint(endpoint)
            self._forget_speculation(endpoint)

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
            if view.overlap is not None:
                return self._perform(
                    endpoint, view, self._on_overlap(endpoint, view, view.overlap, seq, batch)
                )
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

    def on_replay_cut(self, endpoint: EndpointId, now_s: float) -> BatchResult:
        """The replay asked for last was stopped because more came than could be kept."""
        view = self._views.get(endpoint)
        return Applied() if view is None else self._perform(endpoint, view, view.stream.on_replay_cut())

    def _perform(self, endpoint: EndpointId, view: View, step: Step) -> BatchResult:
        counters = view.counters
        view.standing = None
        if step.clear:
            counters.clears += 1
            if view.overlap is not None:
                counters.snapshots_refused += 1
                view.overlap = None
            self._index.clear(endpoint)
            self._forget_speculation(endpoint)
        applied = self._apply(endpoint, view, step)
        if step.replay is not None:
            counters.count_replay(step.replay)
            return step.replay
        if step.held:
            return Buffered(view.stream.held_batches)
        return applied

    def _apply(self, endpoint: EndpointId, view: View, step: Step) -> Applied:
        if step.duplicate:
            view.counters.duplicate_batches += 1
            return Applied(duplicate=True)
        if not step.apply:
            return Applied()
        parts = [self._index.apply_batch(endpoint, batch) for batch in step.apply]
        applied = parts[0] if len(parts) == 1 else sum_applied(parts)
        view.counters.count_applied(applied, len(parts))
        if applied.clears:
            self._forget_speculation(endpoint)
        if applied.stored_blocks:
            view.stream.on_resolved_store()
        return applied

    # --- other signs than events ----------------------------------------------------------------

    def distrust(self, endpoint: EndpointId) -> None:
        """Drop all claims of the endpoint: it is known by another way than events that they are void.

        An engine that sleeps or was reset tells so only with its next scheduling step (case S-C06). Its
        stream is followed on; what it stores from now on is claimed, as a lower bound.
        """
        view = self._views.get(endpoint)
        if view is not None:
            view.pull_misses = 0
            view.standing = None
            view.counters.distrusted += 1
            self._index.clear(endpoint)
            view.stream.distrust()

    def note_pull(self, source: EndpointId, *, missed: bool) -> None:
        """A pull from `source` has ended: with blocks, or (`missed`) because it held none of them. Too
        many misses in a row and its claims are dropped. Pulls that failed otherwise say nothing here."""
        view = self._views.get(source)
        if view is None:
            return
        view.pull_misses = view.pull_misses + 1 if missed else 0
        if view.pull_misses >= MAX_PULL_MISSES:
            self.distrust(source)

    # --- views of siblings ----------------------------------------------------------------------

    def export(self, endpoint: EndpointId) -> ExportedView | None:
        """What a sibling can take over; None without a claim, or where no engine could confirm it."""
        steps = list(self.export_steps(endpoint, 1 << 62))
        return steps[-1] if steps else None

    def export_steps(self, endpoint: EndpointId, step_blocks: int) -> Iterator[ExportedView | None]:
        """As `export`, in steps that keep a loop free: None after each, the view at last; nothing at all
        without a claim. It is the view at the moment of this call."""
        view = self._views.get(endpoint)
        position = None if view is None else view.stream.position
        if position is None:
            return iter(())
        dumps = self._index.dump_steps(endpoint, step_blocks)
        return (None if dump is None else ExportedView(position, dump) for dump in dumps)

    def adopt(self, endpoint: EndpointId, exported: ExportedView) -> None:
        """Take over a sibling's view of an endpoint that was just added. It claims nothing until the
        engine's replay has confirmed it, and is dropped if the replay does not.

        Raises:
            AdoptionRefused: nothing was taken over; the endpoint's life goes on as without.
        """
        for _ in self.adopt_steps(endpoint, exported, exported.dump.blocks or 1):
            pass

    def adopt_steps(self, endpoint: EndpointId, exported: ExportedView, step_blocks: int) -> Iterator[int]:
        """As `adopt`, in steps that keep a loop free; yields the blocks taken over. Report nothing of the
        endpoint before the last step.

        Raises:
            AdoptionRefused: see `adopt`; also between two steps, if the endpoint was cleared or left.
        """
        view = self._views.get(endpoint)
        if view is None:
            raise AdoptionRefused("unknown_endpoint")
        if not exported.position.is_sound:
            raise AdoptionRefused("position")
        if not view.stream.can_adopt:
            raise AdoptionRefused("started")
        view.standing = None
        try:
            yield from self._index.restore_steps(endpoint, exported.dump, step_blocks)
        except DumpRefused as error:
            raise AdoptionRefused(error.reason) from error
        if self._views.get(endpoint) is not view or not view.stream.can_adopt:
            if view is self._views.get(endpoint):
                self._index.clear(endpoint)
            raise AdoptionRefused("overtaken")
        view.standing = None
        complete = exported.dump.complete
        view.stream.adopt(replace(exported.position, exact=exported.position.exact and complete))
        view.overlap = Overlap(complete)

    def _on_overlap(
        self, endpoint: EndpointId, view: View, overlap: Overlap, seq: int, batch: Batch | None
    ) -> Step:
        stream = view.stream
        if batch is not None and stream.next_seq is not None and seq < stream.next_seq:
            overlap.hear(seq, batch)
        step = stream.on_replayed(seq, batch)
        if stream.unconfirmed or step.clear:
            return step
        if overlap.contradicts(self._index, endpoint):
            return stream.refuse_adopted()
        view.overlap = None
        view.counters.snapshots_confirmed += 1
        return step

    def _forget_speculation(self, endpoint: EndpointId) -> None:
        if self._speculative is not None:
            self._speculative.forget(endpoint)
