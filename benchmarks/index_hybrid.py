"""`make bench NAME=index_hybrid`: what sliding-window groups add to a look-up and to stores.

3,000 blocks against 64 endpoints of a model with one full-attention group and one sliding window of 128
tokens (as gpt-oss has), both told in raw messages, on the device:

* plain: the full-attention group alone;
* hybrid: both groups hold the same blocks;
* holes: of the window group every 500th block and the nine behind it are left, so each prefix is cut.

Also the milliseconds of one message of 512, 4,096 and 65,536 blocks: a message is one step of the loop.
Last line: JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec

from benchmarks.index import SEED, best_us, new_index
from benchmarks.index_workload import BLOCK_TOKENS, endpoint, held_depths, prompt
from engine_plugin.identity import EndpointId
from epp.core.events import BlockRemoved
from epp.core.index_choice import IndexMaker, available_indexes
from epp.core.prefix_index import PrefixIndex, PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash
from epp.kvevents.packed_codec import Decode, choose_decoder

ENDPOINTS, EVENT_BLOCKS, WINDOW_TOKENS = 64, 32, 128
KEPT_EVERY, KEPT_BLOCKS = 500, 10
REPEATS = 2
FULL, WINDOW = (0, "full_attention", None), (1, "sliding_window", WINDOW_TOKENS)

encode = msgspec.msgpack.Encoder().encode


def message(first: int, tokens: Sequence[int], group: tuple[int, str, int | None]) -> bytes:
    """A store of blocks named by their place in the prompt, from `first` on."""
    count = len(tokens) // BLOCK_TOKENS
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(first + 1, first + count + 1)),
        "parent_block_hash": first or None,
        "token_ids": list(tokens),
        "block_size": BLOCK_TOKENS,
        "medium": "GPU",
        "extra_keys": [None] * count,
        "group_idx": group[0],
        "kv_cache_spec_kind": group[1],
        "kv_cache_spec_sliding_window": group[2],
    }
    return encode([0.0, [event], 0])


def store_ns(index: PrefixIndex, decode: Decode, wanted: dict[EndpointId, int], hybrid: bool) -> float:
    """CPU nanoseconds a block of the full-attention group, its twin in the window group included."""
    tokens, groups = prompt(), [FULL, WINDOW] if hybrid else [FULL]
    raw = [
        (owner, message(start, tokens[start * BLOCK_TOKENS : stop * BLOCK_TOKENS], group))
        for owner, depth in wanted.items()
        for start in range(0, depth, EVENT_BLOCKS)
        for stop in [min(start + EVENT_BLOCKS, depth)]
        for group in groups
    ]
    started = time.process_time()
    for owner, payload in raw:
        index.apply_batch(owner, decode(payload))
    return (time.process_time() - started) / sum(wanted.values()) * 1e9


def make_holes(index: PrefixIndex, wanted: dict[EndpointId, int]) -> None:
    for owner, depth in wanted.items():
        lost = [EngineBlockHash(at + 1) for at in range(depth) if at % KEPT_EVERY >= KEPT_BLOCKS]
        index.apply(owner, [BlockRemoved(CacheTier.DEVICE, tuple(lost), WINDOW[0])])


def measure(make: IndexMaker, decode: Decode) -> dict[str, float]:
    wanted, query, figures = held_depths(ENDPOINTS), PrefixQuery(prompt()), {}
    for name, hybrid in (("plain", False), ("hybrid", True)):
        times = []
        for _ in range(REPEATS):
            index = new_index(make, ENDPOINTS)
            times.append(store_ns(index, decode, wanted, hybrid))
        found = index.depths(query, wanted)
        assert {owner: depths.blocks for owner, depths in found.items()} == wanted
        figures[f"{name}_us"] = best_us(lambda index=index: index.depths(query, wanted))  # type: ignore[misc]
        figures[f"{name}_store_ns"] = min(times)
    make_holes(index, wanted)
    cut = [d.blocks for d in index.depths(query, wanted).values()]
    assert all(
        depth % KEPT_EVERY == KEPT_BLOCKS or depth == KEPT_BLOCKS for depth in cut if depth > KEPT_BLOCKS
    )
    figures["holes_us"] = best_us(lambda: index.depths(query, wanted))
    return figures


def message_ms(make: IndexMaker, decode: Decode, blocks: int) -> float:
    tokens = (prompt() * (blocks // 3_000 + 1))[: blocks * BLOCK_TOKENS]
    samples = []
    for _ in range(REPEATS):
        index = make(SEED)
        index.add_endpoint(endpoint(0))
        index.apply_batch(endpoint(0), decode(message(0, tokens[:BLOCK_TOKENS], FULL)))
        payload = message(1, tokens, FULL)
        started = time.thread_time()
        index.apply_batch(endpoint(0), decode(payload))
        samples.append(time.thread_time() - started)
    return min(samples) * 1e3


def main() -> None:
    result: dict[str, float] = {}
    for name, make in available_indexes().items():
        decode = choose_decoder(name).decode
        figures = measure(make, decode)
        figures |= {f"message_{n}_ms": message_ms(make, decode, n) for n in (512, 4_096, 65_536)}
        print(f"{name:>9}: " + ", ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
        result |= {f"{key}_{name}": round(value, 3) for key, value in figures.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
