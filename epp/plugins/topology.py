"""`topology-affinity-filter` and `-scorer`: near the endpoint that the stage before picked. Semantics:
llm-d-router at ebab687.

Nearness is the tightest level at which both endpoints have the same non-empty label. It is a preference:
without a peer, or without one candidate that is near enough, everybody stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import REFERENCE_LABELS, Data, Inputs, Kind, Need, PluginType, TopologyLabels
from epp.plugins.unknown import NEUTRAL

LEVELS = ("host", "rack", "zone", "region")  # tightest first
SCORES = (1.0, 0.20, 0.05, 0.02)


class TopologyExtractorParameters(Parameters):
    hostname: str = "kubernetes.io/hostname"
    rack: str = "topology.kubernetes.io/rack"
    zone: str = "topology.kubernetes.io/zone"
    region: str = "topology.kubernetes.io/region"

    @property
    def labels(self) -> TopologyLabels:
        return TopologyLabels(self.hostname, self.rack, self.zone, self.region)


class TopologyScorerParameters(Parameters):
    topology_producer_name: str | None = None


class TopologyFilterParameters(TopologyScorerParameters):
    min_affinity: Literal["host", "rack", "zone", "region"] = "host"


def nearness(one: Mapping[str, str], other: Mapping[str, str], names: TopologyLabels) -> int | None:
    """Index into `LEVELS`; None: nothing in common that is known."""
    for level, label in enumerate((names.hostname, names.rack, names.zone, names.region)):
        value = one.get(label)
        if value and value == other.get(label):
            return level
    return None


def _levels(
    context: ScheduleContext, candidates: Sequence[Candidate], names: TopologyLabels
) -> list[int | None] | None:
    """None: no peer is known."""
    if context.peer is None:
        return None
    peer = context.peer.labels
    return [nearness(peer, c.endpoint.labels, names) for c in candidates]


@dataclass(frozen=True, slots=True)
class TopologyFilter:
    """Keep what is at least as near as `min_affinity`."""

    name: str
    min_affinity: str = "host"
    names: TopologyLabels = REFERENCE_LABELS

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        levels = _levels(context, candidates, self.names)
        if levels is None:
            return candidates
        least = LEVELS.index(self.min_affinity)
        near = [
            c for c, level in zip(candidates, levels, strict=True) if level is not None and level <= least
        ]
        return near or candidates


@dataclass(frozen=True, slots=True)
class TopologyScorer:
    """Same host 1, rack 0.20, zone 0.05, region 0.02, else 0; without a peer 0.5 for all."""

    name: str
    names: TopologyLabels = REFERENCE_LABELS

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        levels = _levels(context, candidates, self.names)
        if levels is None:
            return [NEUTRAL] * len(candidates)
        return [0.0 if level is None else SCORES[level] for level in levels]


def _filter(name: str, p: TopologyFilterParameters, inputs: Inputs) -> object:
    return TopologyFilter(name, p.min_affinity, inputs.topology)


def _scorer(name: str, _p: TopologyScorerParameters, inputs: Inputs) -> object:
    return TopologyScorer(name, inputs.topology)


_NEEDS = (Need(Data.TOPOLOGY, "topology_producer_name"),)
ROWS = (
    PluginType("topology-affinity-filter", Kind.FILTER, TopologyFilterParameters, _filter, _NEEDS),
    PluginType("topology-affinity-scorer", Kind.SCORER, TopologyScorerParameters, _scorer, _NEEDS),
    PluginType("topology-extractor", Kind.EXTRACTOR, TopologyExtractorParameters, provides=Data.TOPOLOGY),
)
