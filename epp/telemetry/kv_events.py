"""Metrics of the event intake: what came from each endpoint, whether it could be read, how old it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.core.endpoint_picker import EndpointPicker
from epp.kvevents.manager import KvEventsManager


class KvEventsCollector(Collector):
    """Read when Prometheus asks; endpoints that have left are gone from it."""

    def __init__(
        self, picker: EndpointPicker, events: KvEventsManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._picker = picker
        self._events = events
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "kvpull_epp_kv_event_messages", "Received, by kind or fault.", labels=["endpoint", "outcome"]
        )
        unusable = GaugeMetricFamily(
            "kvpull_epp_kv_events_unusable", "1: messages come, none can be read.", labels=["endpoint"]
        )
        age_s = GaugeMetricFamily(
            "kvpull_epp_kv_event_age_seconds",
            "Since the last batch; an idle engine sends none.",
            labels=["endpoint"],
        )
        now_s = self._clock()
        for endpoint in self._picker.endpoints:
            name = str(endpoint.id)
            last_s = self._picker.cache.stats(endpoint.id).last_event_s
            if last_s is not None:
                age_s.add_metric([name], now_s - last_s)
            if self._events.source(endpoint.id) is None:
                continue
            counters = self._events.counters(endpoint.id)
            messages.add_metric([name, "live"], counters.live_messages)
            messages.add_metric([name, "replayed"], counters.replayed_messages)
            messages.add_metric([name, "undecodable"], counters.undecodable_batches)
            for reason, count in counters.malformed_reasons.items():
                messages.add_metric([name, f"malformed_{reason}"], count)
            unusable.add_metric([name], float(counters.unusable))
        yield from (messages, unusable, age_s)
