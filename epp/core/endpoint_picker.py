"""The facade that the live server and the simulator both drive: plain values in, plain values out.

One thread owns an `EndpointPicker`; no method awaits, so every call is atomic and there are no locks.
Life of a request: `schedule` (books load) -> `pull_finished` -> `first_token` -> `release` (idempotent).
Metrics, endpoint changes and, through `cache`, the engines' events enter sideways.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from engine_plugin.identity import EndpointId
from epp.core.approx_prefix import ApproxLookUp, ApproxPrefixes
from epp.core.cache_view import CacheView
from epp.core.columns import candidate_rows
from epp.core.decision_record import DecisionRecord, DecisionRing, PullState
from epp.core.disagg import Placement, split_by_role
from epp.core.endpoint_pool import EndpointPool
from epp.core.errors import NoEndpoints
from epp.core.load_ledger import LoadLedger
from epp.core.model_names import ModelNames
from epp.core.next_turn import Ahead, NextTurns
from epp.core.outlook import Outlook
from epp.core.picker_results import EndpointSnapshot as EndpointSnapshot
from epp.core.picker_results import make_decision, snapshots
from epp.core.picker_settings import PickerSettings as PickerSettings
from epp.core.plugin import SaturationDetector
from epp.core.scraped_metrics import ScrapedMetrics
from epp.core.source_selector import SourceSelector
from epp.core.types import (
    PULL_MISSED,
    Candidate,
    Endpoint,
    EndpointMetrics,
    Outcome,
    PullReport,
    ScheduleContext,
    SchedulingDecision,
    SchedulingRequest,
    SourceChoice,
)
from epp.core.view_state import LookUp

_NOTHING_PLACED = ApproxLookUp({})


class EndpointPicker:
    """Destination first, source second."""

    def __init__(self, settings: PickerSettings, cache: CacheView) -> None:
        self._settings = settings
        self._cache = cache
        self._pool = EndpointPool()
        self._metrics = ScrapedMetrics()
        self._ledger = LoadLedger()
        self._models = ModelNames(settings.base_models)
        self._ring = DecisionRing(settings.ledger_capacity)
        self._sources = SourceSelector(settings.source_producer)
        self._approx = ApproxPrefixes(settings.approx) if settings.approx else None
        self._now_s = 0.0  # as last heard: good enough to age what was learned

    # --- the pool -------------------------------------------------------------------------------
    @property
    def cache(self) -> CacheView:
        """What the engines said they hold: cache events enter here."""
        return self._cache

    @property
    def ledger(self) -> LoadLedger:
        return self._ledger

    @property
    def models(self) -> ModelNames:
        return self._models

    @property
    def reads_placements(self) -> bool:
        """Prompts without exact tokens are worth cutting into pieces."""
        return self._approx is not None

    @property
    def next_turns(self) -> NextTurns | None:
        """Orders to pull ahead of a request come from here."""
        return self._settings.next_turns

    @property
    def placed_blocks(self) -> int | None:
        """Distinct blocks that endpoints were given, as far as is remembered; None: nothing is."""
        return self._approx.blocks if self._approx is not None else None

    @property
    def header_names(self) -> frozenset[str]:
        """Request headers that plugins read, in lower case."""
        return self._settings.header_names

    @property
    def identity_headers(self) -> tuple[str, ...]:
        """Request headers that name an agent's session, the first one that is there; in lower case."""
        return self._settings.identity_headers

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The pool in the order of its ids: the order in which sources are sampled."""
        return self._pool.in_order

    def upsert_endpoint(self, endpoint: Endpoint, *, has_replay: bool = True) -> bool:
        """Add an endpoint, or change its labels or draining state. A changed address is another
        engine, a replay socket that came or went another stream: what was known is dropped. True: its
        cache view starts afresh."""
        if self._pool.is_another(endpoint, has_replay):
            self.remove_endpoint(endpoint.id)
        is_new = endpoint.id not in self._pool
        if is_new:
            self._cache.add_endpoint(endpoint.id, has_replay=has_replay)
        self._pool.put(endpoint, has_replay)
        return is_new

    def remove_endpoint(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint. Load booked on it ends with its own requests."""
        if self._pool.remove(endpoint_id):
            self._cache.remove_endpoint(endpoint_id)
            self._forget_placements(endpoint_id)
        self._sources.refusals.forget(endpoint_id)
        self._metrics.forget(endpoint_id)
        self._models.forget(endpoint_id)

    def update_metrics(self, endpoint_id: EndpointId, metrics: EndpointMetrics) -> None:
        """Latest scrape; ignored for an endpoint that has left the pool. Falling asleep voids its claims."""
        if endpoint_id not in self._pool:
            return
        if metrics.asleep and not self._metrics.last(endpoint_id).asleep:
            self._cache.distrust(endpoint_id)
            self._forget_placements(endpoint_id)
        self._metrics.update(endpoint_id, metrics)
        self._models.report(endpoint_id, metrics.model_name)
        if self._approx is not None:
            self._approx.note_cache(endpoint_id, metrics.cache_tokens)

    def update_refusals(
        self, endpoint_id: EndpointId, refused: Mapping[tuple[str, str], float], now_s: float
    ) -> None:
        """Peers that this engine refused or was refused by, by (peer, reason), as its page counts them."""
        if endpoint_id in self._pool:
            self._sources.refusals.observe(endpoint_id, refused, now_s)

    @property
    def sources(self) -> SourceSelector:
        """Thresholds and this replica's share of the limits enter here."""
        return self._sources

    # --- requests -------------------------------------------------------------------------------
    def schedule(self, request: SchedulingRequest, now_s: float, decision_id: str) -> SchedulingDecision:
        """Choose destination, prefill endpoint and KV source, and book the load.

        Raises:
            NoEndpoints: nothing can serve this request.
        """
        self.expire(now_s)
        look_up, placed, candidates = self._candidates(request, now_s)
        context, placement, choice, refused_peers = self._place(request, candidates, now_s)
        computing = placement.computing
        headers = self._tell_followers(context, candidates, placement)
        decision = make_decision(
            decision_id, request, placement, computing, choice, refused_peers, headers, context.outlook
        )
        report_by_s = now_s + self._settings.pull_lease_s
        self._book(decision, request, computing, report_by_s)
        endpoints = (decision.computing, decision.destination.id)
        self._cache.place(decision_id, look_up, endpoints, now_s)
        if self._approx is not None:
            self._approx.place(placed, endpoints)
        self._ring.add(decision, now_s, report_by_s=report_by_s)
        if self._settings.next_turns is not None:
            self._settings.next_turns.placed(decision_id, request)
        return decision

    def look_ahead(self, request: SchedulingRequest, now_s: float) -> Ahead | None:
        """Where the request would be computed if it came now, and from whom it would pull. Nothing is booked,
        and nobody hears of it. None: nothing could serve it."""
        try:
            _, _, candidates = self._candidates(request, now_s)
            _, placement, choice, _ = self._place(request, candidates, now_s)
        except NoEndpoints:
            return None
        computing = placement.computing
        return Ahead(computing, choice, candidates, self._sources.costs.token_bytes(computing.endpoint.id))

    def pull_finished(self, report: PullReport, reporter: EndpointId) -> bool:
        """`reporter` says how a pull of its own ended. False: not its pull, or it was settled before."""
        record = self._ring.get(report.decision_id)
        if record is None or record.decision.computing != reporter or not self._ring.join_report(report):
            return False
        self._ledger.pull_finished(report.decision_id)
        source = record.decision.kv_source
        if source is not None and (report.received_tokens or report.reason == PULL_MISSED):
            self._cache.note_pull(source.id, missed=not report.received_tokens)
        self._learn(report.decision_id)
        return True

    def expire(self, now_s: float) -> None:
        """Give up on pulls that no engine has reported the end of. `schedule` does it, too."""
        self._now_s = now_s
        self._ledger.expire_pulls(now_s)
        self._ring.expire(now_s)

    def first_token(self, decision_id: str) -> None:
        self._ledger.first_token(decision_id)
        self._cache.on_first_token(decision_id)

    def release(self, decision_id: str, outcome: Outcome | None = None) -> bool:
        """End a request in whatever way it ended. Idempotent: False if it was already released."""
        released = self._ledger.release(decision_id)
        if outcome is not None and outcome.completed and outcome.status == 200:
            self._cache.on_first_token(decision_id)  # it had one, also where the gateway shows no bodies
        self._cache.on_release(decision_id)
        if released:
            self._ring.close(decision_id, outcome or Outcome())
            self._learn(decision_id)
            self._end_turn(decision_id, outcome or Outcome())
        return released

    def apply(self, settings: PickerSettings) -> None:
        """Place by another configuration from now on. Requests in flight, cache views, metrics and what is
        known of placements stay. Times, capacities and names of the base model are not changed."""
        self._settings = self._settings.changed_to(settings)
        self._sources.set_producer(settings.source_producer)

    # --- looking in -----------------------------------------------------------------------------
    @property
    def records(self) -> DecisionRing:
        return self._ring

    def find_decision(self, decision_or_request_id: str) -> DecisionRecord | None:
        return self._ring.find(decision_or_request_id)

    def rows(self, now_s: float) -> list[Candidate]:
        """Every endpoint with its metrics and load, in the order of ids."""
        ids = [e.id for e in self.endpoints]
        metrics = self._metrics.current(ids, now_s, self._settings.metrics_staleness_s)
        loads = self._ledger.loads(ids)
        return list(map(Candidate, self.endpoints, metrics, loads))

    def saturation(self, detector: SaturationDetector, now_s: float, unbooked: int = 0) -> float | None:
        """How full the pool is, with `unbooked` requests on their way to it; None: there is no endpoint.
        With roles, of the stage that is fuller: a request needs both."""
        rows = [row for row in self.rows(now_s) if not row.endpoint.draining]
        stages = [stage for stage in split_by_role(rows) if stage]
        return max((detector.saturation(stage, now_s, unbooked) for stage in stages), default=None)

    def snapshot(self, now_s: float) -> tuple[EndpointSnapshot, ...]:
        """Every endpoint with its metrics, load and compatibility with the others."""
        return snapshots(self.rows(now_s))

    # --- inside ---------------------------------------------------------------------------------
    def _place(
        self, request: SchedulingRequest, candidates: Sequence[Candidate], now_s: float
    ) -> tuple[ScheduleContext, Placement, SourceChoice, frozenset[str]]:
        """Destination, then source. Nothing is booked."""
        outlook = Outlook(request, candidates, self._sources, now_s) if self._settings.looks_ahead else None
        context = ScheduleContext(request, now_s, random.Random(request.request_id), outlook=outlook)
        placement = self._settings.handler.place(context, candidates)
        computing = placement.computing
        refused_peers = self._sources.refused_by(computing, now_s)
        only = self._intended_source(context, computing)
        choice = self._sources.choose(request, candidates, computing, refused_peers, now_s, only)
        return context, placement, choice, refused_peers

    def _end_turn(self, decision_id: str, outcome: Outcome) -> None:
        turns, record = self._settings.next_turns, self._ring.get(decision_id)
        if turns is not None and record is not None:
            look_ahead = partial(self.look_ahead, now_s=self._now_s)
            turns.ended(decision_id, record.decision.computing, outcome, self._now_s, look_ahead)

    def _learn(self, decision_id: str) -> None:
        record = self._ring.get(decision_id)
        if record is not None and record.outcome is not None and record.pull_state is not PullState.PENDING:
            self._sources.learn(record, self._now_s)

    def _candidates(
        self, request: SchedulingRequest, now_s: float
    ) -> tuple[LookUp, ApproxLookUp, list[Candidate]]:
        pool, ids = self._pool.serving
        if request.subset is not None:
            pool = [e for e in pool if in_subset(e, request.subset)]
            ids = [e.id for e in pool]
        if not pool:
            what = "no endpoint in the pool" if request.subset is None else "no endpoint in the subset"
            raise NoEndpoints(what)
        look_up = self._cache.look_up(request, ids, now_s)
        placed = self._approx.look_up(request, ids) if self._approx else _NOTHING_PLACED
        rows = candidate_rows(
            pool,
            self._metrics.current(ids, now_s, self._settings.metrics_staleness_s),
            self._ledger.loads(ids),
            look_up.matches.values(),
            list(placed.matches.values()) if placed.matches else None,
        )
        return look_up, placed, rows

    def _forget_placements(self, endpoint_id: EndpointId) -> None:
        if self._approx is not None:
            self._approx.forget(endpoint_id)

    def _intended_source(self, context: ScheduleContext, computing: Candidate) -> EndpointId | None:
        """Of the first plugin that has a wish."""
        if not self._settings.source_choosers:
            return None
        wishes = (p.intended_source(context, computing) for p in self._settings.source_choosers)
        return next((wish for wish in wishes if wish is not None), None)

    def _tell_followers(
        self, context: ScheduleContext, candidates: Sequence[Candidate], placement: Placement
    ) -> tuple[tuple[str, str], ...]:
        """Headers for the client, of all followers."""
        headers: dict[str, str] = {}
        if self._settings.followers:
            targets = placement.targets
            for follower in self._settings.followers:
                headers |= follower.placed(context, candidates, targets)
        return tuple(headers.items())

    def _book(
        self,
        decision: SchedulingDecision,
        request: SchedulingRequest,
        computing: Candidate,
        pull_expires_at_s: float,
    ) -> None:
        """What another request is already booked for is not booked twice."""
        pulled = decision.choice.source.gain_tokens if decision.choice.source else 0
        estimate = self._settings.estimate
        self._ledger.book(
            decision.decision_id,
            serving=decision.destination.id,
            computing=decision.computing,
            source=decision.kv_source.id if decision.kv_source else None,
            uncached_prompt_tokens=estimate.prompt_tokens(request, computing, pulled),
            output_tokens=estimate.output_tokens(request),
            pull_expires_at_s=pull_expires_at_s,
        )


def in_subset(endpoint: Endpoint, subset: frozenset[str] | None) -> bool:
    """Whether the gateway's hint, of `ip` or `ip:port`, allows the endpoint; None: no hint."""
    return subset is None or endpoint.host in subset or endpoint.address in subset
