"""What a plugin type is: its kind, its parameters, what it reads, what it provides, how it is built.

The data that one plugin reads of another is named here, so that the wiring can be resolved and shown
before anything is built.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from epp.core.types import Candidate, PrefixMatch
from epp.plugins.parameters import NoParameters, Parameters


class Kind(enum.Enum):
    """What a plugin type may be used as."""

    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    PREFILL_DECIDER = "prefill decider"
    PROFILE_HANDLER = "profile handler"
    PRODUCER = "data producer"
    SOURCE = "data source"
    EXTRACTOR = "extractor"
    DISCOVERY = "discovery"
    DETECTOR = "saturation detector"
    FAIRNESS = "fairness policy"
    ORDERING = "ordering policy"
    USAGE_LIMIT = "usage limit policy"
    PARSER = "parser"


class Data(enum.Enum):
    """What producers make and consumers read."""

    PREFIX_MATCH = "prefix match"
    INFLIGHT_LOAD = "in-flight load"
    TOKENS = "tokens"
    METRICS = "engine metrics"
    TOPOLOGY = "topology"


PrefixReader = Callable[[Candidate], PrefixMatch]
# one object each, so that two configurations compare equal
PRECISE: PrefixReader = attrgetter("match")
PLACED: PrefixReader = attrgetter("placed")


@dataclass(frozen=True, slots=True)
class Need:
    """`parameter` names the producer, where the type has such a parameter; `when` says whether these
    parameters need it at all; `optional`: it is read where it is there, and never added."""

    data: Data
    parameter: str | None = None
    when: Callable[[Any], bool] = lambda _parameters: True
    optional: bool = False


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Worth of a matched block by where it lies (`kvCacheBackendConfigs`; reference defaults)."""

    device: float = 1.0
    cpu: float = 0.8


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """A request header, or one cookie of it (`header` is `cookie` then)."""

    header: str
    cookie: str | None = None

    def read(self, headers: Mapping[str, str]) -> str | None:
        """None: absent or empty."""
        value = headers.get(self.header, "")
        if self.cookie is not None:
            pairs = (part.partition("=") for part in value.split(";"))
            value = next((text.strip() for name, _, text in pairs if name.strip() == self.cookie), "")
        return value or None


@dataclass(frozen=True, slots=True)
class TopologyLabels:
    """Endpoint labels that say where an endpoint is (`topology-extractor`; reference defaults)."""

    hostname: str = "kubernetes.io/hostname"
    rack: str = "topology.kubernetes.io/rack"
    zone: str = "topology.kubernetes.io/zone"
    region: str = "topology.kubernetes.io/region"


REFERENCE_WEIGHTS = TierWeights()
REFERENCE_LABELS = TopologyLabels()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What wiring has found for one instance; whatever it does not need has its default."""

    prefix: PrefixReader = PRECISE
    tier_weights: TierWeights = REFERENCE_WEIGHTS
    topology: TopologyLabels = REFERENCE_LABELS
    attributes: Mapping[str, tuple[HeaderSource, ...]] = field(default_factory=dict)  # by name


@dataclass(frozen=True, slots=True)
class PluginType:
    """`build` makes the instance; None where the parameters only configure something else. `ignored`
    are parameters that are accepted for drop-in use and have no effect, with the reason."""

    type_name: str
    kind: Kind
    parameters: type[Parameters] = NoParameters
    build: Callable[[str, Any, Inputs], object] | None = None
    needs: tuple[Need, ...] = ()
    provides: Data | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    experimental: bool = False  # ours, and may change or go; said at start


def plain(make: Callable[[str], object]) -> Callable[[str, Any, Inputs], object]:
    """Builder of a type without parameters."""
    return lambda name, _parameters, _inputs: make(name)


PREFIX_NEED = Need(Data.PREFIX_MATCH, "prefix_match_info_producer_name")
LOAD_NEED = Need(Data.INFLIGHT_LOAD, "in_flight_load_producer_name")
METRICS_NEED = Need(Data.METRICS)
NO_INPUTS = Inputs()
