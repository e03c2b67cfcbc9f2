"""Dynamo's RadixTree on the workload of `benchmarks.index`; run by it in the peer's own environment.

Claims are about the peer through its Python binding: native Rust on many threads may well be faster.
Prints one JSON object: look-up from a list of tokens (its own hash included), and blocks stored per
CPU-second, from tokens (hash, JSON, apply).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from dynamo._core import RadixTree, compute_block_hash_for_seq

from benchmarks.index_workload import BLOCK_TOKENS, BLOCKS, FLEET, endpoint, fleet, held_depths, prompt

WORKERS = {endpoint(n): n for n in range(FLEET)}


def stored(number: int, parent: int | None, hashes: Sequence[int], token_hashes: Sequence[int]) -> bytes:
    pairs = zip(hashes, token_hashes, strict=True)
    blocks = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in pairs]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def fill(replicas: int) -> tuple[Any, float]:
    """A tree with the fleet's blocks, and blocks stored per CPU-second."""
    tree, count = RadixTree(), 0
    stores = [(WORKERS[owner], event) for owner, event in fleet(replicas)]
    gc.disable()
    started = time.process_time()
    for number, (worker, event) in enumerate(stores):
        token_hashes = compute_block_hash_for_seq(list(event.token_ids or ()), BLOCK_TOKENS)
        tree.apply_event(worker, stored(number, event.parent, event.hashes, token_hashes))
        count += len(event.hashes)
    tree.find_matches([1])  # events go through a queue: wait until it is empty
    elapsed_s = time.process_time() - started
    gc.enable()
    return tree, count / elapsed_s


def look_up_us(tree: Any, repeats: int) -> float:
    tokens = prompt()
    token_hashes = compute_block_hash_for_seq(tokens, BLOCK_TOKENS)
    wanted = held_depths(FLEET)
    for owner, depth in wanted.items():
        for start in range(0, depth, 512):
            stop = min(start + 512, depth)
            names = range(start + 1, stop + 1)
            tree.apply_event(WORKERS[owner], stored(0, start or None, names, token_hashes[start:stop]))
    scores = tree.find_matches(token_hashes).scores
    assert len(token_hashes) == BLOCKS
    assert all(scores[WORKERS[owner], 0] == depth for owner, depth in wanted.items())
    samples = []
    gc.disable()
    for _ in range(repeats):
        started = time.perf_counter()
        _ = tree.find_matches(compute_block_hash_for_seq(tokens, BLOCK_TOKENS)).scores
        samples.append(time.perf_counter() - started)
    return min(samples) * 1e6


def main() -> None:
    tree, stored_per_cpu_s = fill(int(sys.argv[1]))
    print(
        json.dumps({"depths_us_64": look_up_us(tree, int(sys.argv[2])), "stored_per_cpu_s": stored_per_cpu_s})
    )


if __name__ == "__main__":
    main()
