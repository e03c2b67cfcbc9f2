"""Tier bookkeeping: examples of the rules, and a stateful test against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.engine_model.cache import CacheError, PagedCache, TierPool


def names(*values: int) -> list[bytes]:
    return [value.to_bytes(32, "big") for value in values]


def fill(pool: TierPool, *values: int) -> tuple[int, ...]:
    """Store a chain and let go of it."""
    allocation = pool.allocate(len(values))
    assert allocation is not None
    for slot, name in zip(allocation.slots, names(*values), strict=True):
        assert pool.commit(slot, name)
    pool.unpin(allocation.slots)
    return allocation.slots


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = TierPool(4)
    fill(pool, 1, 2, 3, 4)
    first = pool.allocate(1)
    second = pool.allocate(2)
    assert first is not None
    assert second is not None
    assert [*first.evicted, *second.evicted] == names(4, 3, 2)
    assert pool.prefix(names(1, 2, 3, 4)) == (0,)


def test_touched_chain_outlives_an_untouched_younger_one() -> None:
    pool = TierPool(4)
    fill(pool, 1, 2)
    fill(pool, 11, 12)
    pool.touch(names(1, 2))
    allocation = pool.allocate(2)
    assert allocation is not None
    assert list(allocation.evicted) == names(12, 11)


def test_pinned_blocks_are_never_handed_out() -> None:
    pool = TierPool(3)
    slots = fill(pool, 1, 2, 3)
    pool.pin(slots[:2])
    assert pool.available == 1
    assert pool.allocate(2) is None
    allocation = pool.allocate(1)
    assert allocation is not None
    assert list(allocation.evicted) == names(3)


def test_slots_are_untouched_until_nothing_freed_is_left() -> None:
    pool = TierPool(10)
    first = pool.allocate(3)
    assert first is not None
    pool.unpin(first.slots)
    second = pool.allocate(4)
    assert second is not None
    assert second.slots == (0, 1, 2, 3)


def test_second_copy_of_a_block_stays_unnamed_and_is_freed() -> None:
    pool = TierPool(2)
    fill(pool, 1)
    allocation = pool.allocate(1)
    assert allocation is not None
    assert not pool.commit(allocation.slots[0], names(1)[0])
    pool.unpin(allocation.slots)
    assert (len(pool), pool.available) == (1, 2)
    pool.check_integrity()


def test_generation_changes_with_every_hand_out() -> None:
    pool = TierPool(1)
    fill(pool, 1)
    before = pool.generation(0)
    pool.pin((0,))
    pool.unpin((0,))
    assert pool.generation(0) == before
    fill(pool, 2)
    assert pool.generation(0) == before + 1


def test_quarantined_slots_come_back_only_when_named_usable() -> None:
    pool = TierPool(2)
    allocation = pool.allocate(2)
    assert allocation is not None
    pool.quarantine(allocation.slots)
    assert (pool.available, pool.quarantined) == (0, 2)
    assert pool.usable((0, 0)) == 1
    assert pool.available == 1
    pool.check_integrity()


def test_clear_forgets_names_but_not_slots_in_use() -> None:
    pool = TierPool(3)
    slots = fill(pool, 1, 2)
    pool.pin(slots[:1])
    assert pool.clear() == 2
    assert (len(pool), pool.available) == (0, 2)
    pool.unpin(slots[:1])
    assert pool.available == 3
    pool.check_integrity()


@pytest.mark.parametrize("action", ["unpin", "pin", "quarantine"])
def test_a_slot_that_nobody_holds_is_refused(action: str) -> None:
    pool = TierPool(2)
    with pytest.raises(CacheError, match="slot 1"):
        getattr(pool, action)((1,))


def test_match_continues_the_device_prefix_in_the_cpu_tier() -> None:
    cache = PagedCache(8, 8)
    device_slots = fill(cache.device, 1, 2)
    cpu_slots = fill(cache.cpu, 2, 3, 4)
    local = cache.match(names(1, 2, 3, 4, 5))
    assert (local.device_slots, local.cpu_slots, local.blocks) == (device_slots, cpu_slots[1:], 4)


def test_match_needs_the_first_block() -> None:
    cache = PagedCache(8, 8)
    fill(cache.device, 2, 3)
    assert cache.match(names(1, 2, 3)).blocks == 0


class PoolMachine(RuleBasedStateMachine):
    """Against: a dict of slot -> (name, references), and an explicit eviction order."""

    SLOTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = TierPool(self.SLOTS)
        self.held: list[list[int]] = []  # groups of referenced slots, as a request holds them
        self.named: dict[int, bytes] = {}
        self.order: list[int] = []  # evictable, oldest first
        self.quarantined: set[int] = set()

    def references(self, slot: int) -> int:
        return sum(group.count(slot) for group in self.held)

    @rule(count=st.integers(0, SLOTS))
    def allocate(self, count: int) -> None:
        free = self.SLOTS - len(self.named) - len(self.quarantined)
        free -= len({s for group in self.held for s in group if s not in self.named})
        allocation = self.pool.allocate(count)
        if count > free + len(self.order):
            assert allocation is None
            return
        assert allocation is not None
        expected = [self.named.pop(self.order.pop(0)) for _ in range(max(0, count - free))]
        assert list(allocation.evicted) == expected
        assert all(self.references(slot) == 0 for slot in allocation.slots)
        assert not self.quarantined & set(allocation.slots)
        self.held.append(list(allocation.slots))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), value=st.integers(0, 9))
    def commit(self, data: st.DataObject, value: int) -> None:
        slots = [slot for group in self.held for slot in group if slot not in self.named]
        if not slots:
            return
        slot, name = data.draw(st.sampled_from(slots)), names(value)[0]
        accepted = self.pool.commit(slot, name)
        assert accepted == (name not in self.named.values())
        if accepted:
            self.named[slot] = name

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        group = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.unpin(group)
        for slot in reversed(group):
            if slot in self.named and self.references(slot) == 0:
                self.order.append(slot)

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.named)))
        self.pool.pin((slot,))
        self.held.append([slot])
        if slot in self.order:
            self.order.remove(slot)

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.named)))
        self.pool.touch([self.named[slot]])
        if slot in self.order:
            self.order.remove(slot)
            self.order.append(slot)

    @rule(value=st.integers(0, 9))
    def forget(self, value: int) -> None:
        name = names(value)[0]
        slot = next((s for s, n in self.named.items() if n == name), None)
        assert self.pool.forget(name) == (slot is not None)
        if slot is not None:
            del self.named[slot]
            if slot in self.order:
                self.order.remove(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        group = self.held[index]
        if any(slot in self.named or self.references(slot) != 1 for slot in group):
            return
        self.pool.quarantine(self.held.pop(index))
        self.quarantined.update(group)

    @rule()
    def end_quarantine(self) -> None:
        assert self.pool.usable(range(self.SLOTS)) == len(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert {name: slot for slot, name in self.named.items()} == {
            name: self.pool.find(name) for name in self.pool.names()
        }
        for slot in range(self.SLOTS):
            assert self.pool.references(slot) == self.references(slot)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_naming_many_slots_is_naming_each() -> None:
    pools = [TierPool(6), TierPool(6)]
    names = [b"a", b"b", b"a", b"c"]
    for pool in pools:
        allocation = pool.allocate(4)
        assert allocation is not None
        if pool is pools[0]:
            found = pool.commit_all(allocation.slots, names)
        else:
            found = [pool.commit(slot, name) for slot, name in zip(allocation.slots, names, strict=True)]
        assert found == [True, True, False, True]
        pool.unpin(allocation.slots)
        pool.check_integrity()
    assert sorted(pools[0].names()) == sorted(pools[1].names())
    with pytest.raises(CacheError):
        pools[0].commit_all((0,), [b"x"])
