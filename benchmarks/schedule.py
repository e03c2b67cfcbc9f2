"""`make bench NAME=schedule`: one `EndpointPicker.schedule`, candidates built, scored, picked, source chosen.

3,000 matched blocks of 16 tokens on 64 and on 1,024 endpoints with the demo's profile. Prints the best
and the median CPU time and the part that is the index look-up; a ratio against hashing the same tokens alone,
measured in turn with it, says how far from the unavoidable work it is on whatever machine this runs.
Growth with endpoints and prompt length: `benchmarks.schedule_growth`.
The collector of cycles is off, as it nearly is in the picker. Last line: JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from array import array
from collections.abc import Callable

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.events import BlockStored, EventBatch
from epp.core.hashing import BlockHasher, pack_tokens
from epp.core.index_choice import choose_index
from epp.core.speculation import SpeculationSettings
from epp.core.types import CacheTier, Endpoint, EndpointMetrics, EngineBlockHash, SchedulingRequest

BLOCK_TOKENS = 16
BLOCKS = 3_000
REPEATS = 40
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: precise-prefix-cache-producer}
- {type: prefix-cache-scorer}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: active-request-scorer}
- {type: max-score-picker}
- {type: p2p-source-producer, parameters: {minCachedTokenDelta: 2048}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: active-request-scorer, weight: 2}
  - {pluginRef: max-score-picker}
"""


def build(
    endpoints: int, speculation: SpeculationSettings | None = None, *, blocks: int = BLOCKS
) -> tuple[EndpointPicker, SchedulingRequest]:
    """A pool whose endpoint i holds the first share of the prompt, deeper with i."""
    view = CacheView(choose_index().make(bytes(16)), speculation=speculation)
    picker = EndpointPicker(parse_config(CONFIG).settings, view)
    tokens = array("I", [(i * 2_654_435_761) % 150_000 for i in range(blocks * BLOCK_TOKENS)])
    hashes = tuple(EngineBlockHash(i + 1) for i in range(blocks))
    for number in range(endpoints):
        endpoint = Endpoint(EndpointId(f"pod-{number:04d}"), f"10.{number >> 8}.{number & 255}.1", 8000)
        picker.upsert_endpoint(endpoint)
        picker.cache.on_connect(endpoint.id, 0.0)
        picker.cache.on_replay_end(endpoint.id, True, 0.0)
        depth = max(min(8, blocks), blocks * (number + 1) // endpoints)
        stored = tuple(
            BlockStored(
                tier,
                hashes[:depth],
                None,
                tokens[: depth * BLOCK_TOKENS],
                BLOCK_TOKENS,
                has_extra_keys=True,
            )
            for tier in (CacheTier.DEVICE, CacheTier.CPU)
        )
        picker.cache.on_batch(endpoint.id, 0, EventBatch(stored), 0.0)
        picker.update_metrics(endpoint.id, EndpointMetrics(0.0, number % 7, 1.0, 0.3, BLOCK_TOKENS))
    return picker, SchedulingRequest("request", "model", tokens)


Work = Callable[[int], object]


def cpu_us(*works: Work, repeats: int = REPEATS) -> list[list[float]]:
    """CPU time of each, in turns, so that all of them see the same machine."""
    samples: list[list[float]] = [[] for _ in works]
    for n in range(repeats):
        for work, into in zip(works, samples, strict=True):
            started_s = time.thread_time()
            work(n)
            into.append((time.thread_time() - started_s) * 1e6)
    return samples


def measure(endpoints: int) -> list[list[float]]:
    """Samples of schedule and release, of the look-up alone, and of hashing alone."""
    picker, request = build(endpoints)
    ids = [e.id for e in picker.endpoints]
    hasher = BlockHasher(bytes(16))
    assert request.token_ids is not None
    tokens = request.token_ids

    def schedule(n: int) -> None:
        picker.schedule(request, 0.0, f"d{n}")
        picker.release(f"d{n}")

    def chain(_: int) -> None:
        hasher.chain(hasher.root("", None, None), pack_tokens(tokens), BLOCK_TOKENS)

    return cpu_us(schedule, lambda _: picker.cache.match(request, ids), chain)


def main() -> None:
    gc.disable()
    figures: dict[str, float] = {}
    print(f"{BLOCKS} blocks of {BLOCK_TOKENS} tokens; CPU time in us, best and median of {REPEATS}")
    print(f"{'endpoints':>10} {'schedule':>9} {'median':>7} {'match':>7} {'hashing':>8} {'x hashing':>10}")
    for endpoints in (64, 1_024):
        schedule, match, hashing = measure(endpoints)
        best, ratio = min(schedule), min(schedule) / min(hashing)
        figures[f"us_{endpoints}"] = round(best)
        figures[f"match_us_{endpoints}"] = round(min(match))
        figures[f"x_hashing_{endpoints}"] = round(ratio, 1)
        print(
            f"{endpoints:>10} {best:>9.0f} {statistics.median(schedule):>7.0f} {min(match):>7.0f} "
            f"{min(hashing):>8.0f} {ratio:>10.1f}"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
