"""The compiled tier evicts what the plain one evicts; only then may results not say which one ran."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.engine_model.cache import CacheError
from simulator import tiers
from simulator.tiers import EngineTiers, Names, PlainTier, Tier, make_tier
from tests.unit.simulator.test_fleet import pool_run
from tests.unit.simulator.world import LOAD_FIRST

compiled = pytest.importorskip("simulator._compiled_tier")

CHAINS = [array("Q", [number << 32 | block for block in range(1, 13)]) for number in range(1, 6)]


def held(tier: Tier) -> set[int]:
    return {name for chain in CHAINS for name in chain if name in tier}


class Pair:
    """The same calls to both; slots are each tier's own."""

    def __init__(self, slots: int) -> None:
        self.tiers: tuple[Tier, Tier] = (PlainTier(slots), compiled.CompiledTier(slots))
        self.open: list[tuple[array[int], array[int]]] = []

    def compute(self, names: Names, named: int) -> None:
        """What a request does: pin its prefix, allocate the rest, name some of it, and stay."""
        prefixes = [tier.prefix(names) for tier in self.tiers]
        assert len(prefixes[0]) == len(prefixes[1])
        found = []
        for tier, prefix in zip(self.tiers, prefixes, strict=True):
            tier.pin(prefix)
            allocated = tier.allocate(len(names) - len(prefix))
            if allocated is None:
                tier.unpin(prefix)
                found.append(None)
                continue
            slots, evicted = allocated
            part = names[len(prefix) :][:named]
            found.append((prefix + slots, evicted.tolist(), tier.commit_all(slots[:named], part)))
        ours, theirs = found
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours[1:] == theirs[1:]
            self.open.append((ours[0], theirs[0]))

    def end(self, number: int) -> None:
        if self.open:
            for tier, slots in zip(self.tiers, self.open.pop(number % len(self.open)), strict=True):
                tier.unpin(slots)

    def check(self) -> None:
        plain, other = self.tiers
        for tier in self.tiers:
            tier.check_integrity()
        assert (plain.available, plain.in_use, len(plain)) == (other.available, other.in_use, len(other))
        assert held(plain) == held(other)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "end", "store", "touch"]),
            st.integers(0, len(CHAINS) - 1),
            st.integers(0, 12),
            st.integers(0, 12),
        ),
        max_size=40,
    ),
)
def test_both_tiers_hold_and_evict_the_same(slots: int, work: list[tuple[str, int, int, int]]) -> None:
    pair = Pair(slots)
    for what, chain, first, last in work:
        names = CHAINS[chain][min(first, last) : max(first, last)]
        if what == "compute":
            pair.compute(CHAINS[chain][:last], first)
        elif what == "end":
            pair.end(first)
        elif what == "store":
            (fresh, gone), (fresh2, gone2) = (tier.store(names) for tier in pair.tiers)
            assert (fresh, gone.tolist()) == (fresh2, gone2.tolist())
        else:
            for tier in pair.tiers:
                tier.touch(names)
        pair.check()


def test_a_tier_grows_beyond_its_first_tables_and_forgets_the_oldest() -> None:
    tier = make_tier(5000)
    for begin in range(0, 9000, 100):
        fresh, _ = tier.store(array("Q", range(begin, begin + 100)))
        assert fresh == b"\1" * 100
    tier.check_integrity()
    assert (len(tier), tier.available, tier.in_use) == (5000, 5000, 0)
    assert [name in tier for name in (3999, 4000, 8999)] == [False, True, True]


@pytest.mark.parametrize("make", [PlainTier, compiled.CompiledTier])
def test_a_broken_rule_is_an_error_and_not_a_wrong_figure(make: type[Tier]) -> None:
    tier = make(4)  # type: ignore[call-arg]
    allocated = tier.allocate(2)
    assert allocated is not None
    slots, _ = allocated
    assert tier.allocate(3) is None
    tier.commit_all(slots, array("Q", [1, 2]))
    with pytest.raises(CacheError):
        tier.commit_all(slots, array("Q", [3, 4]))
    tier.unpin(slots)
    with pytest.raises(CacheError):
        tier.unpin(slots)
    with pytest.raises(CacheError):
        tier.pin(array("i", [3]))
    with pytest.raises(ValueError, match="at least one slot"):
        make(0)  # type: ignore[call-arg]


def test_a_device_prefix_goes_on_in_the_cpu_tier() -> None:
    both = EngineTiers.empty(8, 8)
    both.device.store(array("Q", [1, 2]))
    both.cpu.store(array("Q", [1, 2, 3, 5]))
    device, cpu = both.match(array("Q", [1, 2, 3, 4, 5]))
    assert (len(device), len(cpu)) == (2, 1)
    both.check_integrity()


def test_a_fleet_decides_and_answers_the_same_on_either_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiled = pool_run(LOAD_FIRST, 3)
    monkeypatch.setattr(tiers, "_COMPILED", None)
    with_plain = pool_run(LOAD_FIRST, 3)
    assert isinstance(next(iter(with_plain.engines.values())).cache.cpu, PlainTier)
    assert repr(with_plain.records) == repr(with_compiled.records)
