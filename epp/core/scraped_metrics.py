"""The last scrape of every endpoint; what is stale is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_plugin.identity import EndpointId
from epp.core.types import UNKNOWN_METRICS, EndpointMetrics


class ScrapedMetrics:
    """Owned by the picker, on its thread."""

    def __init__(self) -> None:
        self._last: dict[EndpointId, EndpointMetrics] = {}
        self._stale: dict[EndpointId, tuple[EndpointMetrics, EndpointMetrics]] = {}  # without its figures

    def last(self, endpoint: EndpointId) -> EndpointMetrics:
        """Whatever its age; UNKNOWN_METRICS: never scraped."""
        return self._last.get(endpoint, UNKNOWN_METRICS)

    def update(self, endpoint: EndpointId, metrics: EndpointMetrics) -> None:
        """What is no finite number is unknown from here on."""
        self._last[endpoint] = metrics.without_nonsense()

    def forget(self, endpoint: EndpointId) -> None:
        self._last.pop(endpoint, None)
        self._stale.pop(endpoint, None)

    def current(
        self, endpoints: Sequence[EndpointId], now_s: float, max_age_s: float
    ) -> list[EndpointMetrics]:
        """Of each; figures older than `max_age_s` are unknown."""
        known = self._last
        return [
            m
            if m.scraped_at_s is not None and now_s - m.scraped_at_s <= max_age_s
            else self._without_figures(e, m)
            for e, m in zip(endpoints, [known.get(e, UNKNOWN_METRICS) for e in endpoints], strict=True)
        ]

    def _without_figures(self, endpoint: EndpointId, metrics: EndpointMetrics) -> EndpointMetrics:
        """Made once a scrape: a whole pool may be stale."""
        if metrics is UNKNOWN_METRICS:
            return metrics
        last = self._stale.get(endpoint)
        if last is None or last[0] is not metrics:
            changed = replace(
                metrics, waiting_requests=None, running_requests=None, kv_usage=None, loras=None
            )
            last = self._stale[endpoint] = metrics, changed
        return last[1]
