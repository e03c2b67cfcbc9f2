"""`make bench NAME=placement`: the placement tree, alone and inside a decision.

3,000-block prompts of which 500 blocks are a shared system prompt, 500 of them in flight over 64
endpoints: median of insert, match and withdraw, and the same for prompts ten times as long; all next to
the index's own look-up of one such prompt (64 endpoints that hold it) in the same run. Then
`schedule` with and without speculative entries, and what the tree's byte estimates are worth.
Last line: JSON.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from math import inf

from benchmarks.schedule import BLOCK_TOKENS, build
from engine_plugin.identity import EndpointId
from epp.core.hashing import Family, PromptKeys
from epp.core.index_choice import choose_index
from epp.core.placement_nodes import Claim
from epp.core.placement_tree import PlacementLimits, PlacementTree
from epp.core.prefix_index import PrefixQuery
from epp.core.speculation import SpeculationSettings

BLOCKS, SHARED_BLOCKS, IN_FLIGHT, ENDPOINTS = 3_000, 500, 500, 64
REPEATS = 200


def median_us(work: Callable[[int], object], repeats: int = REPEATS) -> float:
    """CPU time, the collector off: neighbours on the machine and old garbage are not the question."""
    samples = []
    gc.collect()
    gc.disable()
    for n in range(repeats):
        started = time.process_time()
        work(n)
        samples.append(time.process_time() - started)
    gc.enable()
    return statistics.median(samples) * 1e6


def prompts(rng: random.Random, count: int, scale: int = 1) -> list[PromptKeys]:
    """Random keys stand for chained ones: what matters is where they differ."""
    shared = array("Q", [rng.getrandbits(64) for _ in range(SHARED_BLOCKS * scale)])
    tail_bytes = 8 * scale * (BLOCKS - SHARED_BLOCKS)
    return [shared + array("Q", rng.randbytes(tail_bytes)) for _ in range(count)]


def tree_figures(scale: int) -> dict[str, float]:
    rng = random.Random(1)
    endpoints = [EndpointId(f"pod-{n:04d}") for n in range(ENDPOINTS)]
    tree = PlacementTree(PlacementLimits(1 << 30))
    flying = prompts(rng, IN_FLIGHT + REPEATS, scale)
    for n in range(IN_FLIGHT):
        tree.insert(flying[n], endpoints[n % ENDPOINTS], 2.0 + n / 1_000)
    claims: list[Claim] = []

    def insert(n: int) -> None:
        claim = tree.insert(flying[IN_FLIGHT + n], endpoints[n % ENDPOINTS], 3.0 + n / 1_000)
        assert claim is not None
        claims.append(claim)

    insert_us = median_us(insert)
    match_us = median_us(lambda n: tree.match(flying[n % IN_FLIGHT], 1.0))
    shared = [flying[n][: SHARED_BLOCKS * scale] + flying[n + 1][-9:] for n in range(8)]
    shared_us = median_us(lambda n: tree.match(shared[n % 8], 1.0))
    withdraw_us = median_us(lambda n: tree.withdraw(claims[n], 1))
    tree.check_integrity()
    return {"insert": insert_us, "match": match_us, "match_shared": shared_us, "withdraw": withdraw_us}


def index_look_up_us() -> tuple[float, float]:
    """The index's look-up of a prompt that all of 64 endpoints hold: alone, and with its keys."""
    picker, request = build(ENDPOINTS)
    index = picker.cache._index
    assert request.token_ids is not None
    query, ids = PrefixQuery(list(request.token_ids)), [e.id for e in picker.endpoints]
    keys: dict[Family, PromptKeys] = {}
    return median_us(lambda _: index.depths(query, ids)), median_us(lambda _: index.depths(query, ids, keys))


def schedule_us(endpoints: int) -> tuple[float, float]:
    """Requests that are scheduled and get their first token, without and with speculation. In turns, so
    that both see the same machine; the prompt is another one behind block 500 every time."""
    pools = [build(endpoints), build(endpoints, SpeculationSettings())]
    samples: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    for n in range(60):
        for (picker, request), found in zip(pools, samples, strict=True):
            tokens = array("I", request.token_ids or ())
            tokens[SHARED_BLOCKS * BLOCK_TOKENS] = n
            asked = replace(request, token_ids=tokens)
            started = time.process_time()
            picker.schedule(asked, n / 100, f"d{n}")
            picker.first_token(f"d{n}")
            picker.release(f"d{n}")
            found.append(time.process_time() - started)
    gc.enable()
    off_us, on_us = (statistics.median(found) * 1e6 for found in samples)
    return off_us, on_us


def bytes_share() -> float:
    """What the tree really takes, over what it says: 4,000 claims of sessions with a common head."""
    rng = random.Random(2)
    head = array("Q", [rng.getrandbits(64) for _ in range(50)])
    sessions = [head + array("Q", rng.randbytes(8 * 400)) for _ in range(500)]
    endpoints = [EndpointId(f"pod-{n:04d}") for n in range(ENDPOINTS)]
    gc.collect()
    tracemalloc.start()
    tree = PlacementTree(PlacementLimits(1 << 30))
    for number, session in enumerate(sessions):
        for turn in range(8):
            tree.insert(session[: 50 + 50 * (turn + 1)], endpoints[(number + turn) % ENDPOINTS], inf)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / tree.bytes


def main() -> None:
    look_up_us, with_keys_us = index_look_up_us()
    choice = choose_index()
    print(
        f"index ({choice.implementation}): look-up {look_up_us:.0f} us, with the keys {with_keys_us:.0f} us"
    )
    figures: dict[str, float] = {"look_up_us": round(look_up_us), "with_keys_us": round(with_keys_us)}
    for scale in (1, 10):
        row = tree_figures(scale)
        print(f"{BLOCKS * scale:>6} blocks: " + ", ".join(f"{k} {v:.1f} us" for k, v in row.items()))
        suffix = "" if scale == 1 else f"_x{scale}"
        figures |= {f"{k}_us{suffix}": round(v, 1) for k, v in row.items()}
    figures["insert_share"] = round(figures["insert_us"] / look_up_us, 3)
    figures["match_share"] = round(figures["match_us"] / look_up_us, 3)
    for endpoints in (64, 1_024):
        off_us, on_us = schedule_us(endpoints)
        print(f"schedule, {endpoints} endpoints: {off_us:.0f} us off, {on_us:.0f} us on")
        figures[f"schedule_added_us_{endpoints}"] = round(on_us - off_us)
        figures[f"schedule_ratio_{endpoints}"] = round(on_us / off_us, 2)
    figures["bytes_share"] = round(bytes_share(), 2)
    print(f"bytes taken / bytes counted: {figures['bytes_share']}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
