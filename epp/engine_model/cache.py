"""Which blocks an engine holds, in which slot of which tier: bookkeeping without bytes.

`TierPool` is one tier: a fixed number of slots, names (block hashes) for the slots whose content is
complete, references for those in use, least-recently-used reuse for the rest. `PagedCache` is a
device tier over a CPU tier. Semantics: vLLM's KV block manager (reuse order, tail of a chain first) and its
CPU offload tier (inclusive, written through).

Pure and synchronous: no I/O, clock or logging; every call is atomic for a single-threaded owner.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BlockHash = bytes


class CacheError(RuntimeError):
    """The owner broke the rules (released what it does not hold, named a slot twice): a bug."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Slots handed out with one reference each and no name; `evicted` lost their place for it."""

    slots: tuple[int, ...]
    evicted: tuple[BlockHash, ...]


class TierPool:
    """Slots of one tier. A slot is exactly one of: free (unnamed, unreferenced), evictable (named,
    unreferenced), in use (referenced, named or not), or quarantined (may still be written by a peer).
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a tier needs at least one slot, not {slots}")
        self.slots = slots
        self._refs = [0] * slots
        self._generations = [0] * slots
        self._names: list[BlockHash | None] = [None] * slots
        self._by_name: dict[BlockHash, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._freed: list[int] = []  # heap of slots used before; lowest first keeps runs together
        self._untouched = 0  # slots from here on were never handed out: their memory is untouched
        self._quarantined: set[int] = set()

    # --- questions: nothing below mutates -------------------------------------------------------
    def __contains__(self, name: BlockHash) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self) -> Iterable[BlockHash]:
        """Names of all complete blocks, in no particular order."""
        return self._by_name.keys()

    def find(self, name: BlockHash) -> int | None:
        """Slot of a complete block, or None."""
        return self._by_name.get(name)

    def prefix(self, names: Sequence[BlockHash]) -> tuple[int, ...]:
        """Slots of the longest contiguous prefix of `names` held here."""
        found: list[int] = []
        get = self._by_name.get
        for name in names:
            slot = get(name)
            if slot is None:
                break
            found.append(slot)
        return tuple(found)

    def missing(self, names: Sequence[BlockHash]) -> list[int]:
        """Indices of `names` that are not held here."""
        by_name = self._by_name
        return [index for index, name in enumerate(names) if name not in by_name]

    def generation(self, slot: int) -> int:
        """How often the slot has been handed out: changes whenever its content may change."""
        return self._generations[slot]

    def references(self, slot: int) -> int:
        return self._refs[slot]

    @property
    def available(self) -> int:
        """Slots that `allocate` could hand out now."""
        return self.slots - self._untouched + len(self._freed) + len(self._evictable)

    @property
    def in_use(self) -> int:
        """Slots that are referenced or quarantined."""
        return self.slots - self.available

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    # --- changes ---------------------------------------------------------------------------------
    def allocate(self, count: int) -> Allocation | None:
        """Hand out `count` unnamed slots, ascending, one reference each; None (and no change) if
        there are not that many. Order: freed slots, untouched slots, then the oldest evictable."""
        if count > self.available:
            return None
        slots = [heapq.heappop(self._freed) for _ in range(min(count, len(self._freed)))]
        fresh = min(count - len(slots), self.slots - self._untouched)
        slots.extend(range(self._untouched, self._untouched + fresh))
        self._untouched += fresh
        oldest = [slot for slot, _ in zip(self._evictable, range(count - len(slots)), strict=False)]
        names, by_name, evictable = self._names, self._by_name, self._evictable
        evicted: list[BlockHash] = []
        for slot in oldest:
            name = names[slot]
            if name is None:
                raise CacheError(f"slot {slot} has no name")
            evicted.append(name)
            del by_name[name], evictable[slot]
            names[slot] = None
        slots.extend(oldest)
        slots.sort()
        refs, generations = self._refs, self._generations
        for slot in slots:
            refs[slot] = 1
            generations[slot] += 1
        return Allocation(tuple(slots), tuple(evicted))

    def commit(self, slot: int, name: BlockHash) -> bool:
        """The slot's content is complete and is `name`. False (and no change) if another slot
        holds that block already: the caller's copy then stays unnamed.

        Raises:
            CacheError: the slot is not in use, or is named already.
        """
        if self._refs[slot] < 1 or self._names[slot] is not None:
            raise CacheError(f"slot {slot} cannot be named: references {self._refs[slot]}")
        if name in self._by_name:
            return False
        self._names[slot] = name
        self._by_name[name] = slot
        return True

    def commit_all(self, slots: Sequence[int], names: Sequence[BlockHash]) -> list[bool]:
        """`commit` of each slot with its name, in order; what each would have returned.

        Raises:
            CacheError: as `commit`; the slots before the wrong one are named.
        """
        refs, named, by_name = self._refs, self._names, self._by_name
        fresh: list[bool] = []
        for slot, name in zip(slots, names, strict=True):
            if refs[slot] < 1 or named[slot] is not None:
                raise CacheError(f"slot {slot} cannot be named: references {refs[slot]}")
            new = name not in by_name
            if new:
                named[slot] = name
                by_name[name] = slot
            fresh.append(new)
        return fresh

    def pin(self, slots: Iterable[int]) -> None:
        """One more reference each: the slots keep their content until as many `unpin` calls.

        Raises:
            CacheError: a slot is neither in use nor named.
        """
        refs = self._refs
        for slot in slots:
            if refs[slot] == 0:
                if self._names[slot] is None:
                    raise CacheError(f"slot {slot} holds nothing to pin")
                del self._evictable[slot]
            refs[slot] += 1

    def unpin(self, slots: Sequence[int]) -> None:
        """One reference less each, given in chain order: the tail becomes the first victim.
        Unnamed slots without references are free at once.

        Raises:
            CacheError: a slot is not in use.
        """
        refs, names, evictable = self._refs, self._names, self._evictable
        for slot in reversed(slots):
            left = refs[slot] - 1
            if left < 0:
                raise CacheError(f"slot {slot} is not in use")
            refs[slot] = left
            if left == 0:
                if names[slot] is None:
                    heapq.heappush(self._freed, slot)
                else:
                    evictable[slot] = None

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Mark blocks, given in chain order, as used now (the head last); unknown names are ignored."""
        get, refs, to_end = self._by_name.get, self._refs, self._evictable.move_to_end
        for name in reversed(names):
            slot = get(name)
            if slot is not None and refs[slot] == 0:
                to_end(slot)

    def quarantine(self, slots: Sequence[int]) -> None:
        """Take unnamed slots out of circulation: a peer may still write into them. Drops the
        caller's reference.

        Raises:
            CacheError: a slot is not held by exactly one reference, or is named.
        """
        for slot in slots:
            if self._refs[slot] != 1 or self._names[slot] is not None:
                raise CacheError(f"slot {slot} cannot be quarantined")
            self._refs[slot] = 0
            self._quarantined.add(slot)

    def usable(self, slots: Iterable[int]) -> int:
        """End the quarantine of those of `slots` that are in it (others are ignored); how many."""
        ended = 0
        for slot in slots:
            if slot in self._quarantined:
                self._quarantined.remove(slot)
                heapq.heappush(self._freed, slot)
                ended += 1
        return ended

    def forget(self, name: BlockHash) -> bool:
        """Drop a block by name (its content proved wrong). Whoever still references the slot keeps
        it, unnamed. Returns whether it was held."""
        slot = self._by_name.get(name)
        if slot is None:
            return False
        self._unname(slot)
        if self._refs[slot] == 0:
            del self._evictable[slot]
            heapq.heappush(self._freed, slot)
        return True

    def clear(self) -> int:
        """Forget every block; returns how many there were. Slots in use stay in use, unnamed."""
        names = list(self._by_name)
        for name in names:
            self.forget(name)
        return len(names)

    def _unname(self, slot: int) -> BlockHash:
        name = self._names[slot]
        if name is None:
            raise CacheError(f"slot {slot} has no name")
        del self._by_name[name]
        self._names[slot] = None
        return name

    def check_integrity(self) -> None:
        """Raises CacheError unless every slot is in exactly one state and the tables agree."""
        freed = set(self._freed)
        evictable = set(self._evictable)
        referenced = {slot for slot, refs in enumerate(self._refs) if refs}
        untouched = set(range(self._untouched, self.slots))
        parts = (freed, evictable, referenced, untouched, self._quarantined)
        if sum(map(len, parts)) != self.slots or set().union(*parts) != set(range(self.slots)):
            raise CacheError("a slot is in no state or in two")
        if len(freed) != len(self._freed):
            raise CacheError("a slot is free twice")
        named = {slot: name for slot, name in enumerate(self._names) if name is not None}
        if {name: slot for slot, name in named.items()} != self._by_name:
            raise CacheError("names and slots disagree")
        if not evictable <= set(named) or named.keys() & (freed | untouched | self._quarantined):
            raise CacheError("a slot without content is named, or one with content is not")


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """What an engine itself holds of a prompt: a device prefix, continued by a CPU run."""

    device_slots: tuple[int, ...]
    cpu_slots: tuple[int, ...]  # of the blocks that follow the device prefix

    @property
    def blocks(self) -> int:
        return len(self.device_slots) + len(self.cpu_slots)


class PagedCache:
    """A device tier over a CPU tier."""

    def __init__(self, device_slots: int, cpu_slots: int) -> None:
        self.device = TierPool(device_slots)
        self.cpu = TierPool(cpu_slots)

    def match(self, names: Sequence[BlockHash]) -> LocalPrefix:
        """Longest prefix that needs no computing and no peer. Changes nothing."""
        device_slots = self.device.prefix(names)
        return LocalPrefix(device_slots, self.cpu.prefix(names[len(device_slots) :]))

    def check_integrity(self) -> None:
        """Raises CacheError if either tier's tables disagree."""
        self.device.check_integrity()
        self.cpu.check_integrity()
