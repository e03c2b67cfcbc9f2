"""What the picker may claim about every engine's cache: event streams in front of one prefix index.

Life of an endpoint: `add_endpoint` -> `on_connect` (asks for a replay from 0) -> replayed and live
batches -> `on_replay_end` -> claims. A gap, an unreadable batch, a disconnect or a restart takes the
claim away until a replay has repaired the view or the view was dropped. Removing the endpoint drops
all of it.

Pure: no clock (`now_s` is an argument), no logging, no I/O. It decides nothing about placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine_plugin.identity import EndpointId
from engine_plugin.salt import salt_forms
from epp.core.adoption import AdoptionRefused, ExportedView, Overlap
from epp.core.cache_match import build_matches, standings
from epp.core.engine_agreement import HashDisagreement, differing, hash_disagreements
from epp.core.event_stream import EventStream
from epp.core.events import Applied, Batch, BatchResult, Buffered, sum_applied
from epp.core.hashing import Family, InvalidTokens, PromptKeys
from epp.core.index_dump import DumpRefused
from epp.core.prefix_index import Depths, PrefixIndex, PrefixQuery
from epp.core.speculation import SpeculationSettings, SpeculativeEntries
from epp.core.stream_step import Step, StreamLimits
from epp.core.types import NO_MATCH, ClaimState, PrefixMatch, SchedulingRequest
from epp.core.view_state import LookUp, View, ViewStats

MAX_PULL_MISSES = 3  # one or two can be blocks that were evicted while the pull was on its way


class CacheView:
    """Owns the index and one `EventStream` an endpoint. Calls for endpoints that were not added are
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
        view = self._views.get(endpoint)
        position = None if view is None else view.stream.position
        return None if position is None else ExportedView(position, self._index.dump(endpoint))

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

    # --- what the picker asks -------------------------------------------------------------------

    def match(
        self, request: SchedulingRequest, endpoints: Iterable[EndpointId]
    ) -> dict[EndpointId, PrefixMatch]:
        """How much of the prompt each endpoint holds, as the engines reported it. An endpoint without a
        claim, or that we do not know, has `state.has_claim` False; a prompt without exact tokens
        matches nothing anywhere. Mutates nothing."""
        wanted = list(endpoints)
        rows, claiming = standings(self._views, self._index, wanted)
        return build_matches(wanted, rows, self._depths(request, claiming), {})

    def look_up(self, request: SchedulingRequest, endpoints: Iterable[EndpointId], now_s: float) -> LookUp:
        """As `match`, with what is expected from requests just placed. That makes no endpoint known: one
        without a claim has none. Matches come in the order of `endpoints`."""
        speculative = self._speculative
        if speculative is None:
            return LookUp(self.match(request, endpoints))
        wanted = list(endpoints)
        rows, claiming = standings(self._views, self._index, wanted)
        keys: dict[Family, PromptKeys] = {}
        depths = self._depths(request, claiming, keys)
        expected: dict[EndpointId, int] = {}
        for prompt in keys.values():
            expected.update(speculative.expected(prompt, depths, now_s))
        return LookUp(build_matches(wanted, rows, depths, expected), keys)

    def _state(self, endpoint: EndpointId, view: View) -> ClaimState:
        state = view.stream.state
        return ClaimState.UNSUPPORTED if state.has_claim and self._index.unsupported(endpoint) else state

    def _depths(
        self,
        request: SchedulingRequest,
        endpoints: list[EndpointId],
        keys: dict[Family, PromptKeys] | None = None,
    ) -> dict[EndpointId, Depths]:
        if request.token_ids is None or not endpoints:
            return {}
        forms = salt_forms(self._salt_key, request.cache_salt)
        queries = [PrefixQuery(request.token_ids, request.lora_name, salt) for salt in forms]
        try:
            # an engine publishes in one form, and finds nothing in the other; the first names the prompt
            found = self._index.depths(queries[0], endpoints, keys)
            others = [self._index.depths(query, endpoints) for query in queries[1:]]
        except InvalidTokens:  # ids that no engine could have: missing cache data is "no match"
            return {}
        for other in others:
            found = {endpoint: _deeper(depths, other[endpoint]) for endpoint, depths in found.items()}
        return found

    # --- where requests went --------------------------------------------------------------------

    def place(self, decision_id: str, look_up: LookUp, endpoints: Iterable[EndpointId], now_s: float) -> None:
        """The looked-up prompt goes to `endpoints`: expect it there, unless all of it is there already.
        Only where a claim can confirm or deny it, and in blocks of the size that the engine has shown."""
        if self._speculative is None or not look_up.keys:
            return
        placed = []
        for endpoint in dict.fromkeys(endpoints):
            view, match = self._views.get(endpoint), look_up.matches.get(endpoint, NO_MATCH)
            if view is not None and match.state.has_claim:
                keys = look_up.keys.get((view.model, match.block_size_tokens))
                if keys is not None and match.blocks < len(keys):
                    placed.append((endpoint, keys))
        self._speculative.place(decision_id, placed, now_s)

    def on_first_token(self, decision_id: str) -> None:
        """The placed prompt was computed."""
        if self._speculative is not None:
            self._speculative.settle(decision_id)

    def on_release(self, decision_id: str) -> None:
        """The placed request has ended; without a first token, nothing is expected of it any more."""
        if self._speculative is not None:
            self._speculative.withdraw(decision_id)

    def _forget_speculation(self, endpoint: EndpointId) -> None:
        if self._speculative is not None:
            self._speculative.forget(endpoint)

    # --- what telemetry reads -------------------------------------------------------------------

    def state(self, endpoint: EndpointId) -> ClaimState:
        """UNKNOWN for endpoints that were not added."""
        view = self._views.get(endpoint)
        return ClaimState.UNKNOWN if view is None else self._state(endpoint, view)

    def stats(self, endpoint: EndpointId) -> ViewStats:
        """Raises KeyError for an endpoint that was not added."""
        view = self._views[endpoint]
        state = self._state(endpoint, view)
        return ViewStats(
            state=state,
            known_empty_start=view.stream.known_empty_start and state.has_claim,
            index=self._index.stats(endpoint),
            counters=view.counters,
            held_batches=view.stream.held_batches,
            last_event_s=view.last_event_s,
            speculative_entries=self._speculative.entries(endpoint) if self._speculative else 0,
        )

    @property
    def index_bytes(self) -> int:
        """What the index takes, as counted against its bound."""
        return self._index.total_bytes

    # --- who differs from the pool --------------------------------------------------------------

    def differing_block_sizes(self) -> frozenset[EndpointId]:
        """Endpoints whose block size, once learned, is not the usual one of their model."""
        by_model: dict[str, dict[EndpointId, int]] = {}
        for endpoint, view in self._views.items():
            size = self._index.block_size_tokens(endpoint)
            if size:
                by_model.setdefault(view.model, {})[endpoint] = size
        return frozenset().union(*map(differing, by_model.values()))

    def hash_disagreements(self) -> tuple[HashDisagreement, ...]:
        """Endpoints whose engines name equal content differently: another hash seed or algorithm."""
        return hash_disagreements({e: self._index.names_of_sample(e) for e in self._views})


def _deeper(one: Depths, other: Depths) -> Depths:
    return Depths(
        max(one.blocks, other.blocks),
        max(one.device_blocks, other.device_blocks),
        max(one.cpu_blocks, other.cpu_blocks),
    )
