"""`python -m benchmarks.churn --hours 24`: pods come and go for a simulated day; memory must stay flat.

The picker with all that follows endpoints (index, ledger, refusals, metrics) on an injected clock: every
simulated minute a pod is replaced by one with a new name, all are scraped, some requests are routed, some of
them never end before their pod is gone, and every 15 minutes /metrics is rendered. Objects known to the
collector and resident memory are compared between the first quarter and the end. The short form is a test
(tests/unit/core/test_day_of_churn.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.fuzz_extproc import CONFIG
from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.events import BlockStored, EventBatch
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import CacheTier, Endpoint, EndpointMetrics, EngineBlockHash, Outcome
from epp.director import Director
from epp.extproc.events import Headers, RequestHead, Routing
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector
from epp.telemetry.pool_gauges import PoolGauges
from epp.thresholds.in_force import ThresholdState

PODS = 20
REQUESTS_A_MINUTE = 6
BLOCK_TOKENS = 16
MODELS = 40  # that clients name; each has a label soon
RING = 64  # decisions that are remembered: full long before the first look
HEADERS = Headers.of(("content-type", "application/json"))


@dataclass(frozen=True, slots=True)
class Size:
    """What the process holds."""

    objects: int
    rss_kb: int
    page_bytes: int


class Day:
    """A pool whose clock is `now_s`."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self.now_s = 0.0
        settings = replace(parse_config(CONFIG).settings, ledger_capacity=RING)
        self.picker = EndpointPicker(settings, CacheView(PythonPrefixIndex(bytes(16))))
        self._registry = CollectorRegistry()
        self._refusals = PeerRefusals()
        clock = self._clock
        self._director = Director(self.picker, None, PickerMetrics(self._registry), clock=clock)
        self._registry.register(PoolCollector(self.picker, ThresholdState, self._refusals, clock=clock))
        self._registry.register(PoolGauges(self.picker, "pool", clock=clock))
        self._pods: list[EndpointId] = []
        self._born = 0
        self._open: list[tuple[float, Routing]] = []  # when it ends
        for _ in range(PODS):
            self._add()

    def _clock(self) -> float:
        return self.now_s

    def minute(self) -> None:
        gone = self._pods.pop(self._rng.randrange(len(self._pods)))
        self.picker.remove_endpoint(gone)
        self._refusals.forget(gone)
        self._add()
        self._scrape()
        for _ in range(REQUESTS_A_MINUTE):
            self._ask()
        self.now_s += 60.0
        for ends_s, routing in self._open:
            if ends_s <= self.now_s:
                self._director.first_token(routing.token)
                self._director.finished(routing.token, Outcome(200, completed=True, completion_tokens=3))
        self._open = [row for row in self._open if row[0] > self.now_s]
        if int(self.now_s) % 900 == 0:
            generate_latest(self._registry)

    def end(self) -> None:
        """Nothing may be left on anybody, were its pod long gone."""
        for _, routing in self._open:
            self._director.finished(routing.token, Outcome())
        self._open.clear()
        for number in range(self._born):
            load = self.picker.ledger.load(EndpointId(f"pod-{number}"))
            assert (load.requests, load.uncached_prompt_tokens, load.pulls_served) == (0, 0, 0), number

    def size(self) -> Size:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss_kb = pages * os.sysconf("SC_PAGE_SIZE") // 1024
        return Size(len(gc.get_objects()), rss_kb, len(generate_latest(self._registry)))

    def _add(self) -> None:
        pod = EndpointId(f"pod-{self._born}")
        host = f"10.{self._born >> 16 & 255}.{self._born >> 8 & 255}.{self._born & 255}"
        self._born += 1
        self._pods.append(pod)
        self.picker.upsert_endpoint(Endpoint(pod, host, 8000))
        self.picker.cache.on_connect(pod, self.now_s)
        self.picker.cache.on_replay_end(pod, True, self.now_s)
        blocks = 20
        hashes = tuple(EngineBlockHash(self._rng.getrandbits(63)) for _ in range(blocks))
        tokens = [self._rng.randrange(32_000) for _ in range(blocks * BLOCK_TOKENS)]
        event = BlockStored(CacheTier.DEVICE, hashes, None, tokens, BLOCK_TOKENS)
        self.picker.cache.on_batch(pod, 0, EventBatch((event,)), self.now_s)

    def _scrape(self) -> None:
        for number, pod in enumerate(self._pods):
            row = EndpointMetrics(self.now_s, float(number % 5), 1.0, 0.5, BLOCK_TOKENS, model_name="base")
            self.picker.update_metrics(pod, row)
            refused = {(f"10.9.{self._born >> 8 & 255}.{self._born & 255}:7777", "seed_fp"): 1.0}
            self._refusals.update(pod, refused)
            self.picker.update_refusals(pod, refused, self.now_s)

    def _ask(self) -> None:
        number = self._rng.getrandbits(40)
        head = RequestHead(HEADERS, "POST", "/v1/completions", f"request-{number}")
        body = json.dumps({"model": f"model-{number % MODELS}", "prompt": "Hello"}).encode()
        routing = self._director.decide(head, body)
        assert isinstance(routing, Routing)
        self._open.append((self.now_s + self._rng.expovariate(1 / 300.0), routing))


def run(hours: float) -> tuple[Size, Size]:
    """Sizes after the first quarter and at the end."""
    day, minutes, early = Day(), int(hours * 60), None
    for minute in range(minutes):
        day.minute()
        if minute == minutes // 4:
            early = day.size()
    late = day.size()
    day.end()
    assert early is not None
    return early, late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every refusal of a new pod is told once: 22,000 lines a day
    started_s = time.monotonic()
    early, late = run(arguments.hours)
    result: dict[str, Any] = {
        "hours": arguments.hours,
        "objects": [early.objects, late.objects],
        "rss_kb": [early.rss_kb, late.rss_kb],
        "metrics_page_bytes": [early.page_bytes, late.page_bytes],
        "seconds": round(time.monotonic() - started_s),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
