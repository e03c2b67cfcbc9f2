"""Which blocks of vLLM's CPU tier can be read, and who holds them, seen from two threads.

vLLM keeps its tier on the scheduler thread, which is away for the length of a step; peers ask on the
transport's thread. So the tier's bookkeeping is repeated here behind one lock: the scheduler thread tells
of stores and removals, the transport pins what it serves, and an eviction leaves pinned blocks alone.
Knows no vLLM and does no I/O.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

MAX_SERVED_KEYS: Final = 65_536  # remembered for recency until the scheduler thread asks


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A readable block: its slot, and the generation of what is in it."""

    slot: int
    generation: int


class TierIndex:
    """Thread-safe; every method holds the lock for a few microseconds a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[bytes, HeldBlock] = {}
        self._pins: Counter[bytes] = Counter()
        self._leases: dict[str, tuple[bytes, ...]] = {}
        self._served: list[bytes] = []
        self._generation = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def leases(self) -> int:
        """Leases held now."""
        return len(self._leases)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that eviction leaves alone now."""
        return len(self._pins)

    # --- the scheduler thread -------------------------------------------------------------------
    def stored(self, key: bytes, slot: int) -> None:
        """`key` can be read in `slot`. No effect where that is known already."""
        with self._lock:
            held = self._blocks.get(key)
            if held is None or held.slot != slot:
                self._generation += 1
                self._blocks[key] = HeldBlock(slot, self._generation)

    def removed(self, key: bytes) -> None:
        """`key` is no longer in the tier; unknown ones are ignored."""
        with self._lock:
            self._forget(key)

    def cleared(self) -> None:
        """The whole tier was emptied, whatever was pinned: every lease is void."""
        with self._lock:
            self._blocks.clear()
            self._pins.clear()
            self._leases.clear()

    @contextmanager
    def evicting(self) -> Iterator[tuple[AbstractSet[bytes], list[bytes]]]:
        """Choose what to evict while nobody can pin: yields the pinned keys, and a list to put the
        evicted ones in."""
        evicted: list[bytes] = []
        with self._lock:
            yield self._pins.keys(), evicted
            for key in evicted:
                self._forget(key)

    def take_served(self) -> list[bytes]:
        """Keys that peers have read since the last call, for the tier's recency."""
        with self._lock:
            served, self._served = self._served, []
            return served

    # --- any thread -----------------------------------------------------------------------------
    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` are held; nothing is pinned."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def lease(self, lease_id: str, keys: Sequence[bytes]) -> list[HeldBlock]:
        """Pin the longest prefix of `keys` that is held; an empty answer is no lease."""
        with self._lock:
            held: list[HeldBlock] = []
            for key in keys:
                block = self._blocks.get(key)
                if block is None:
                    break
                held.append(block)
            if held:
                leased = tuple(keys[: len(held)])
                self._leases[lease_id] = leased
                self._pins.update(leased)
                if len(self._served) < MAX_SERVED_KEYS:
                    self._served.extend(leased)
            return held

    def pin(self, lease_id: str, keys: Collection[bytes]) -> int:
        """Add those of `keys` that are held to a lease (made if need be); how many."""
        with self._lock:
            found = tuple(key for key in keys if key in self._blocks)
            if found:
                self._leases[lease_id] = self._leases.get(lease_id, ()) + found
                self._pins.update(found)
            return len(found)

    def release(self, lease_id: str) -> bool:
        """Unpin a lease; False: there is none of that name."""
        with self._lock:
            keys = self._leases.pop(lease_id, None)
            self._unpin(keys or ())
            return keys is not None

    def holds_lease(self, lease_id: str) -> bool:
        """Whether the lease still stands."""
        return lease_id in self._leases

    def _unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            left = self._pins[key] - 1
            if left > 0:
                self._pins[key] = left
            else:
                del self._pins[key]

    def _forget(self, key: bytes) -> None:
        self._blocks.pop(key, None)


class EitherSet(AbstractSet[bytes]):
    """The union of two sets without copying them."""

    def __init__(self, one: AbstractSet[bytes], other: AbstractSet[bytes]) -> None:
        self._one = one
        self._other = other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other

    def __iter__(self) -> Iterator[bytes]:
        yield from self._one
        yield from (key for key in self._other if key not in self._one)

    def __len__(self) -> int:
        return sum(1 for _ in self)
