"""Priority bands and their bounds, as `flowControl` of the EndpointPickerConfig has them. Pure.

Source of names and defaults: llm-d-router at ebab687.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from epp.core.flow.usage_limits import UsageLimit

DEFAULT_TTL_S: Final = 60.0
DEFAULT_BAND_BYTES: Final = 10**9
DEFAULT_BAND_REQUESTS: Final = 5000
NO_LIMIT: Final = 2**63 - 1


class Ordering(enum.Enum):
    """Which request of a flow is next."""

    FCFS = "fcfs-ordering-policy"  # who came first
    EDF = "edf-ordering-policy"  # whose time to wait ends first
    SLO_DEADLINE = "slo-deadline-ordering-policy"  # whose promised first token is due first


class Fairness(enum.Enum):
    """Which flow of a band is next."""

    GLOBAL_STRICT = "global-strict-fairness-policy"  # none is: the order holds across all flows
    ROUND_ROBIN = "round-robin-fairness-policy"  # each in its turn
    PROGRAM_AWARE = "program-aware-fairness"  # the one that was served least, lately


@dataclass(frozen=True, slots=True)
class BandSettings:
    """Of one priority."""

    max_bytes: int = DEFAULT_BAND_BYTES
    max_requests: int = DEFAULT_BAND_REQUESTS
    ttl_s: float | None = None  # longest wait in it; None: as everywhere, 0: as long as the client
    fairness: Fairness = Fairness.GLOBAL_STRICT
    ordering: Ordering = Ordering.FCFS
    # program-aware only
    half_life_s: float = 60.0  # of what a flow was served; 0: it is never forgotten
    service_weight: float = 0.8  # of having been served little, against
    wait_weight: float = 0.2  # the wait of its next request


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """`bands` by priority; other priorities have the default of their sign. Higher goes first, strictly."""

    max_bytes: int = NO_LIMIT
    max_requests: int = NO_LIMIT
    ttl_s: float | None = DEFAULT_TTL_S  # longest wait; None: as long as the client
    no_endpoint_ttl_s: float | None = DEFAULT_TTL_S  # the same while the pool is empty
    default_band: BandSettings = field(default_factory=BandSettings)
    default_negative_band: BandSettings = field(default_factory=BandSettings)
    bands: Mapping[int, BandSettings] = field(default_factory=lambda: MappingProxyType({}))
    usage_limit: UsageLimit | None = None  # None: every priority is served below saturation 1

    def longest_wait_s(self, priority: int) -> float | None:
        """While there are endpoints; None: as long as the client."""
        own_s = self.band(priority).ttl_s
        return self.ttl_s if own_s is None else own_s or None

    def band(self, priority: int) -> BandSettings:
        """Of this priority."""
        found = self.bands.get(priority)
        if found is not None:
            return found
        return self.default_negative_band if priority < 0 else self.default_band


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits. `id` is never given twice; `flow` is its fairness id, `size_bytes` its body's."""

    id: str
    arrived_s: float
    priority: int = 0
    flow: str = ""
    size_bytes: int = 0
    expires_s: float | None = None  # None: never
    slo_due_s: float | None = None  # its first token was promised until then
