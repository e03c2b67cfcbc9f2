"""A predicted time to the first token, in the parts that it is made of. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from engine_plugin.identity import EndpointId

RUNNING_MS = 0.5  # what a request that is answered beside it adds: its share of the steps meanwhile


@dataclass(frozen=True, slots=True)
class Forecast:
    """One request on one endpoint. `source` None: it computes all that it does not hold."""

    queue_ms: float  # work ahead of it
    floor_ms: float  # what every request pays
    compute_ms: float  # tokens neither held nor pulled
    running: float = 0.0  # requests that are being answered there
    pull_ms: float = 0.0
    source: EndpointId | None = None

    @property
    def busy_ms(self) -> float:
        """What others cost it."""
        return self.queue_ms + self.running * RUNNING_MS

    @property
    def total_ms(self) -> float:
        return self.busy_ms + self.floor_ms + self.compute_ms + self.pull_ms
