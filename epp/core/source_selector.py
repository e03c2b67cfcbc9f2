"""The pull decision's own state: thresholds in force, this replica's share, refused pairs, learned costs.

`choose` gathers what applies now and asks the pure rule; one call sees one generation of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine_plugin.identity import EndpointId
from epp.core.decision_record import DecisionRecord
from epp.core.kv_source import choose_source
from epp.core.pull_cost import PullCosts
from epp.core.refused_pairs import RefusedPairs
from epp.core.thresholds import (
    ALONE,
    NO_THRESHOLDS,
    ROLE_LABEL,
    SOURCE_CLASS_LABEL,
    PolicyTable,
    PullThresholds,
    ReplicaShare,
    SourcePolicy,
)
from epp.core.types import Candidate, SchedulingRequest, SourceChoice


@dataclass(frozen=True, slots=True)
class SourceProducer:
    """`p2p-source-producer` as configured; None as delta: its parameter is not set."""

    min_cached_token_delta: int | None = None


class SourceSelector:
    """Owned by the picker, on its thread."""

    def __init__(self, producer: SourceProducer | None) -> None:
        self._producer = producer
        self._share = ALONE
        self._table = self._compile(NO_THRESHOLDS)
        self.refusals = RefusedPairs()
        self.costs = PullCosts()

    def _compile(self, thresholds: PullThresholds) -> PolicyTable:
        producer = self._producer
        return PolicyTable(
            producer.min_cached_token_delta if producer else None,
            configured=producer is not None,
            thresholds=thresholds,
            share=self._share,
        )

    @property
    def thresholds(self) -> PullThresholds:
        return self._table.thresholds

    def set_thresholds(self, thresholds: PullThresholds) -> None:
        """In force from the next decision on, whole."""
        self._table = self._compile(thresholds)

    def set_producer(self, producer: SourceProducer | None) -> None:
        """As configured now; in force from the next decision on."""
        self._producer = producer
        self._table = self._compile(self._table.thresholds)

    def set_share(self, share: ReplicaShare) -> None:
        """Divide in-flight limits among so many live replicas."""
        self._share = share
        self._table = self._compile(self._table.thresholds)

    def policy(self, model: str | None = None, role: str | None = None) -> SourcePolicy:
        """What applies to a request for `model` computed on an endpoint of `role`."""
        return self._table.policy_for(model, role)

    def refused_by(self, computing: Candidate, now_s: float) -> frozenset[str]:
        return self.refusals.refused_by(computing.endpoint.id, now_s)

    def choose(
        self,
        request: SchedulingRequest,
        candidates: Sequence[Candidate],
        computing: Candidate,
        refused_peers: frozenset[str],
        now_s: float,
        only: EndpointId | None = None,
    ) -> SourceChoice:
        """`candidates` in the order of their ids. `only`: no other one may be named."""
        if only is not None:
            asked = (only, computing.endpoint.id)
            candidates = [row for row in candidates if row.endpoint.id in asked]
        policy = self.policy(request.model, computing.endpoint.labels.get(ROLE_LABEL))
        pricing = partial(self.costs.predict, now_s=now_s)
        return choose_source(request, candidates, computing, policy, refused_peers, pricing)

    def learn(self, record: DecisionRecord, now_s: float) -> None:
        """A request has ended and its pull, if any, is reported: what it took is remembered."""
        computing, source = record.decision.computed_by, record.decision.kv_source
        if computing is not None:
            policy = self.policy(record.decision.model, computing.endpoint.labels.get(ROLE_LABEL))
            terms = policy.of_class(source.labels.get(SOURCE_CLASS_LABEL)) if source else policy
            self.costs.learn(record, terms, now_s)
