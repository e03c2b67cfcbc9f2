"""`make bench NAME=index`: the compiled and the pure prefix index on one workload, in one run.

* look-up: 3,000 blocks of 16 tokens (a list of ints) against 64 and 1,024 endpoints, with a busy
  fleet's blocks behind them;
* events: 32-block stores and removals, in blocks per CPU-second, ready-made events and raw messages;
* memory: resident bytes per block replica, in a process of its own;
* growth: the longest single 32-block store while the index fills (a doubling would show here);
* the same against Dynamo's RadixTree through its Python binding, in an environment of its own.

Both indexes and the peer are measured in turns, and the best turn of each counts: what else runs on the
machine does not strike one of them alone.

Last line: JSON. What cannot be had here (the compiled index, the peer) is said and left out.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.index_workload import BLOCK_TOKENS, BLOCKS, FLEET, Store, endpoint, fleet, held_depths, prompt
from engine_plugin.identity import EndpointId
from epp.core.events import BlockRemoved, BlockStored
from epp.core.index_choice import COMPILED, PURE, IndexMaker, available_indexes
from epp.core.prefix_index import PrefixIndex, PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash
from epp.kvevents.packed_codec import choose_decoder

Message = tuple[EndpointId, bytes]

SEED = bytes(16)
EVENT_REPLICAS = 400_000
MEMORY_REPLICAS = {COMPILED: 2_000_000, PURE: 1_000_000}
REPEATS = 60
TURNS = 3
PEER_VENV = Path(".cache/dynamo")
PEER_INSTALL = ["-m", "pip", "install", "--quiet", "--no-deps", "ai-dynamo-runtime==1.6.1", "msgspec"]


def new_index(make: IndexMaker, endpoints: int) -> PrefixIndex:
    index = make(SEED)
    for number in range(endpoints):
        index.add_endpoint(endpoint(number))
    return index


def best_us(work: Callable[[], object]) -> float:
    """Best of the repeats (the machine may be shared), garbage collection off."""
    work()
    samples = []
    gc.disable()
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    gc.enable()
    return min(samples) * 1e6


def look_up_us(make: IndexMaker, endpoints: int, background: list[Store]) -> float:
    """Tokens to depths; endpoint i holds the first i-th share of the prompt, on both tiers."""
    tokens, wanted = prompt(), held_depths(endpoints)
    hashes = tuple(EngineBlockHash(i + 1) for i in range(BLOCKS))
    index = new_index(make, max(endpoints, FLEET))
    for owner, event in background:
        index.apply(owner, [event])
    for owner, depth in wanted.items():
        held = tokens[: depth * BLOCK_TOKENS]
        for tier in (CacheTier.DEVICE, CacheTier.CPU):
            event = BlockStored(tier, hashes[:depth], None, held, BLOCK_TOKENS, has_extra_keys=True)
            index.apply(owner, [event])
    query, asked = PrefixQuery(tokens), list(wanted)
    found = index.depths(query, asked)
    assert {e: depths.blocks for e, depths in found.items()} == wanted
    return best_us(lambda: index.depths(query, asked))


def events_per_cpu_s(make: IndexMaker, stores: list[Store]) -> tuple[float, float, float]:
    """Blocks per CPU-second stored and removed, and the longest single store in ms."""
    index = new_index(make, FLEET)
    blocks = sum(len(event.hashes) for _, event in stores)
    longest_s = 0.0
    gc.disable()
    started = time.process_time()
    for owner, event in stores:
        index.apply(owner, (event,))
    stored_s = time.process_time() - started
    removals = [(owner, BlockRemoved(event.tier, event.hashes[::-1])) for owner, event in reversed(stores)]
    started = time.process_time()
    for owner, removal in removals:
        index.apply(owner, (removal,))
    removed_s = time.process_time() - started
    index = new_index(make, FLEET)
    for owner, event in stores:
        one = time.thread_time()
        index.apply(owner, (event,))
        longest_s = max(longest_s, time.thread_time() - one)
    gc.enable()
    return blocks / stored_s, blocks / removed_s, longest_s * 1e3


def messages(stores: list[Store]) -> tuple[list[Message], list[Message]]:
    """The stores and their removals as messages of a current engine (maps, every field)."""
    encode = msgspec.msgpack.Encoder().encode
    group = {"group_idx": 0}
    stored, removed = [], []
    for owner, event in stores:
        names = event.hashes
        fields = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": event.parent,
            "token_ids": list(event.token_ids or ()),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(names),
            "kv_cache_spec_kind": "full_attention",
        }
        stored.append((owner, encode([0.0, [fields | group], 0])))
        gone = {"type": "BlockRemoved", "block_hashes": names[::-1], "medium": "GPU"}
        removed.append((owner, encode([0.0, [gone | group], 0])))
    return stored, removed[::-1]


def raw_per_cpu_s(
    implementation: str, make: IndexMaker, blocks: int, raw: tuple[list[Message], list[Message]]
) -> tuple[float, float]:
    """Blocks per CPU-second stored and removed from messages: decode and apply."""
    decode = choose_decoder(implementation).decode
    index = new_index(make, FLEET)
    rates = []
    for batch in raw:
        gc.disable()
        started = time.process_time()
        applied = [index.apply_batch(owner, decode(message)) for owner, message in batch]
        rates.append(blocks / (time.process_time() - started))
        gc.enable()
        assert sum(a.stored_blocks + a.removed_blocks for a in applied) == blocks
    return rates[0], rates[1]


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


def print_bytes_per_replica(implementation: str) -> None:
    """Body of the process that measures memory: fill the index, print bytes per replica."""
    index = new_index(available_indexes()[implementation], FLEET)
    gc.collect()
    before, replicas = resident_bytes(), 0
    for owner, event in fleet(MEMORY_REPLICAS[implementation]):
        index.apply(owner, (event,))
        replicas += len(event.hashes)
    gc.collect()
    print((resident_bytes() - before) / replicas)


def bytes_per_replica(implementation: str) -> float:
    command = [sys.executable, "-m", "benchmarks.index", "--memory", implementation]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def measure(implementation: str, make: IndexMaker, stores: list[Store]) -> dict[str, float]:
    """One turn of an implementation."""
    stored, removed, longest_ms = events_per_cpu_s(make, stores)
    blocks = sum(len(event.hashes) for _, event in stores)
    raw_stored, raw_removed = raw_per_cpu_s(implementation, make, blocks, messages(stores))
    return {
        "depths_us_64": look_up_us(make, 64, stores),
        "depths_us_1024": look_up_us(make, 1_024, stores),
        "stored_per_cpu_s": stored,
        "removed_per_cpu_s": removed,
        "raw_stored_per_cpu_s": raw_stored,
        "raw_removed_per_cpu_s": raw_removed,
        "longest_store_ms": longest_ms,
    }


def best_of(turns: list[dict[str, float]]) -> dict[str, float]:
    """The best of every measure: the least of those in units of time, the most of rates."""
    first = turns[0]
    least = {key for key in first if "_us" in key or key.endswith("_ms")}
    return {key: (min if key in least else max)(turn[key] for turn in turns) for key in first}


def peer_figures() -> dict[str, float]:
    """Dynamo's figures of this run; empty, with a sentence, where it cannot be installed."""
    python = PEER_VENV / "bin" / "python"
    install = [[sys.executable, "-m", "venv", str(PEER_VENV)], [str(python), *PEER_INSTALL]]
    try:
        for command in [] if (PEER_VENV / "complete").exists() else install:
            subprocess.run(command, check=True, capture_output=True, timeout=600)
        (PEER_VENV / "complete").touch()
        run = [str(python), "-m", "benchmarks.index_peer", str(EVENT_REPLICAS), str(REPEATS)]
        output = subprocess.run(run, check=True, capture_output=True, text=True, timeout=600).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the peer is not measured: {error}")
        return {}
    figures: dict[str, float] = json.loads(output)
    return figures


def against_peer(peer: dict[str, float], figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ratios above 1: faster than the peer."""
    ratios = {}
    for name, own in figures.items():
        suffix = "" if name == COMPILED else f"_{name}"
        ratios[f"depths_vs_dynamo{suffix}"] = peer["depths_us_64"] / own["depths_us_64"]
        ratios[f"stored_vs_dynamo{suffix}"] = own["raw_stored_per_cpu_s"] / peer["stored_per_cpu_s"]
    return ratios


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print_bytes_per_replica(sys.argv[2])
        return
    stores = list(fleet(EVENT_REPLICAS))
    makers, own, peers = available_indexes(), defaultdict[str, list[dict[str, float]]](list), []
    for _ in range(TURNS):
        for name, make in makers.items():
            own[name].append(measure(name, make, stores))
        peers.append(peer_figures())
    figures = {
        name: best_of(turns) | {"bytes_per_replica": bytes_per_replica(name)} for name, turns in own.items()
    }
    names = [name for name in (PURE, COMPILED) if name in figures]
    if COMPILED not in names:
        print("the compiled index is not built here: only the pure one is measured")
    print(f"{'measure':>22}" + "".join(f"{name:>14}" for name in names) + f"{'pure / compiled':>18}")
    result: dict[str, float] = {}
    for key in figures[PURE]:
        row = [figures[name][key] for name in names]
        result.update({f"{key}_{name}": value for name, value in zip(names, row, strict=True)})
        ratio = f"{row[0] / row[1]:>18.2f}" if len(row) == 2 else ""
        print(f"{key:>22}" + "".join(f"{value:>14,.2f}" for value in row) + ratio)
    if all(peers):
        peer = best_of(peers)
        ratios = against_peer(peer, figures)
        print("dynamo: " + ", ".join(f"{key} {value:,.1f}" for key, value in peer.items()))
        print("against it: " + ", ".join(f"{key} {value:.2f}" for key, value in ratios.items()))
        result.update(ratios)
    result["bytes_per_replica"] = figures[names[-1]]["bytes_per_replica"]
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


if __name__ == "__main__":
    main()
