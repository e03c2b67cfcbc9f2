"""The workload of the index benchmarks: seeded, and free of third-party imports but msgspec, so that
a peer in another virtual environment gets the very same one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from engine_plugin.identity import EndpointId
from epp.core.events import BlockStored
from epp.core.types import CacheTier, EngineBlockHash

BLOCK_TOKENS = 16
BLOCKS = 3_000
EVENT_BLOCKS = 32
FLEET = 64
SHARED_BLOCKS, OWN_BLOCKS, OWNERS = 256, 128, 4  # of a group of conversations with one system prompt

Store = tuple[EndpointId, BlockStored]


def endpoint(number: int) -> EndpointId:
    return EndpointId(f"pod-{number:04d}")


def chain(rng: random.Random, blocks: int, parent: int | None) -> list[BlockStored]:
    """A chain of random blocks in events of 32."""
    events = []
    for start in range(0, blocks, EVENT_BLOCKS):
        count = min(EVENT_BLOCKS, blocks - start)
        hashes = tuple(EngineBlockHash(rng.getrandbits(63)) for _ in range(count))
        tokens = array("I", [rng.randrange(152_000) for _ in range(BLOCK_TOKENS * count)])
        above = None if parent is None else EngineBlockHash(parent)
        events.append(BlockStored(CacheTier.DEVICE, hashes, above, tokens, BLOCK_TOKENS, has_extra_keys=True))
        parent = hashes[-1]
    return events


def fleet(replicas: int, seed: int = 3) -> Iterator[Store]:
    """Stores of a fleet: system prompts held by four endpoints each, eight conversations behind each."""
    rng = random.Random(seed)
    made = 0
    while made < replicas:
        owners = [endpoint(n) for n in rng.sample(range(FLEET), OWNERS)]
        shared = chain(rng, SHARED_BLOCKS, None)
        for owner in owners:
            yield from ((owner, event) for event in shared)
        for n in range(8):
            own = chain(rng, OWN_BLOCKS, shared[-1].hashes[-1])
            yield from ((owners[n % OWNERS], event) for event in own)
        made += OWNERS * SHARED_BLOCKS + 8 * OWN_BLOCKS


def prompt() -> list[int]:
    """The prompt that is looked up: 3,000 blocks."""
    rng = random.Random(1)
    return [rng.randrange(152_000) for _ in range(BLOCKS * BLOCK_TOKENS)]


def held_depths(endpoints: int) -> dict[EndpointId, int]:
    """How many blocks of the prompt each endpoint holds: endpoint i its i-th share."""
    return {endpoint(n): max(8, BLOCKS * (n + 1) // endpoints) for n in range(endpoints)}
