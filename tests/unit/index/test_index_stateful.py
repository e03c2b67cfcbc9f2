"""The index against the naive model: holes, refills, tiers, duplicates, scrambled order, clears."""

from __future__ import annotations

import zlib
from typing import ClassVar, cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_plugin.identity import EndpointId
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from epp.core.index_choice import COMPILED, available_indexes
from epp.core.prefix_index import Depths, PrefixQuery, PythonPrefixIndex
from epp.core.types import CacheTier, EngineBlockHash
from tests.unit.index.naive import NaiveEndpoint, Root

SIZES = {EndpointId("a"): 2, EndpointId("b", 1): 3}
ENDPOINTS = list(SIZES)
ROOTS: list[Root] = [(None, None), ("adapter", "salt"), (None, "salt")]
# few prompts with shared beginnings, so that the same blocks are met again all the time
PROMPTS = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9],
    [0, 1, 9, 9, 9, 9],
    [7, 7, 7, 7, 7, 7],
]

endpoints = st.sampled_from(ENDPOINTS)
tiers = st.sampled_from([CacheTier.DEVICE, CacheTier.CPU])
roots = st.sampled_from([ROOTS[0], *ROOTS])
prompts = st.sampled_from(PROMPTS)
WINDOWS = {1: 3, 2: 6}  # groups besides the full-attention one, and their windows in tokens
groups = st.sampled_from(list(WINDOWS))
domains = st.sampled_from([0, 0, 1])  # an engine that changes its hashing names one content twice


def name_of(domain: int, root: Root, tokens: tuple[int, ...]) -> EngineBlockHash:
    return EngineBlockHash(zlib.crc32(repr((domain, root, tokens)).encode()) + 1)


class IndexMachine(RuleBasedStateMachine):
    make_index: ClassVar[type[PythonPrefixIndex]] = PythonPrefixIndex

    def __init__(self) -> None:
        super().__init__()
        self.index = self.make_index(b"\x07" * 16)
        self.naive: dict[EndpointId, NaiveEndpoint] = {}
        for endpoint in ENDPOINTS:
            self.index.add_endpoint(endpoint)
            self.naive[endpoint] = NaiveEndpoint()

    def names(
        self, endpoint: EndpointId, domain: int, root: Root, prompt: list[int]
    ) -> list[EngineBlockHash]:
        size = SIZES[endpoint]
        count = len(prompt) // size
        return [name_of(domain, root, tuple(prompt[: (i + 1) * size])) for i in range(count)]

    @rule(
        endpoint=endpoints,
        tier=tiers,
        root=roots,
        prompt=prompts,
        domain=domains,
        cut=st.tuples(st.sampled_from([0, 0, 0, 1, 2, 4]), st.integers(1, 6)),
    )
    def store_tokens(
        self,
        endpoint: EndpointId,
        tier: CacheTier,
        root: Root,
        prompt: list[int],
        domain: int,
        cut: tuple[int, int],
    ) -> None:
        size = SIZES[endpoint]
        names = self.names(endpoint, domain, root, prompt)
        start, stop = min(cut[0], max(0, len(names) - 1)), min(cut[0] + cut[1], len(names))
        if start >= stop:
            return
        lora, salt = root
        per_block = [(lora,) if lora else ()] * (stop - start)
        if start == 0 and salt:
            per_block[0] = (*per_block[0], salt)
        event = BlockStored(
            tier,
            tuple(names[start:stop]),
            names[start - 1] if start else None,
            prompt[start * size : stop * size],
            size,
            lora_name=lora,
            extra_keys=tuple(keys or None for keys in per_block),
            has_extra_keys=True,
        )
        self.index.apply(endpoint, [event])
        naive = self.naive[endpoint]
        naive.block_size_tokens = size
        for i in range(start, stop):
            block = tuple(prompt[i * size : (i + 1) * size])
            naive.store(names[i], names[i - 1] if i else None, root, block, tier)

    @rule(
        endpoint=endpoints, tier=tiers, root=roots, prompt=prompts, domain=domains, with_tokens=st.booleans()
    )
    def store_by_name(
        self,
        endpoint: EndpointId,
        tier: CacheTier,
        root: Root,
        prompt: list[int],
        domain: int,
        with_tokens: bool,
    ) -> None:
        """Token-less, or (CPU only) with tokens that do not tell salted from unsalted content."""
        size = SIZES[endpoint]
        names = self.names(endpoint, domain, root, prompt)
        if not names:
            return
        tokens = prompt[-size:] if with_tokens and tier is CacheTier.CPU else None
        parent = names[-2] if len(names) > 1 else None
        self.index.apply(endpoint, [BlockStored(tier, (names[-1],), parent, tokens, size if tokens else 0)])
        self.naive[endpoint].store_by_name(names[-1], tier)

    @rule(endpoint=endpoints, tier=tiers, root=roots, prompt=prompts, domain=domains, only_last=st.booleans())
    def remove(
        self,
        endpoint: EndpointId,
        tier: CacheTier,
        root: Root,
        prompt: list[int],
        domain: int,
        only_last: bool,
    ) -> None:
        names = self.names(endpoint, domain, root, prompt)
        chosen = names[-1:] if only_last else names
        self.index.apply(endpoint, [BlockRemoved(tier, tuple(chosen))])
        for name in chosen:
            self.naive[endpoint].remove(name, tier)

    @rule(
        endpoint=endpoints,
        tier=tiers,
        group=groups,
        root=roots,
        prompt=prompts,
        start=st.integers(0, 5),
        count=st.integers(1, 6),
        rarely=st.integers(0, 2),
    )
    def store_in_group(
        self,
        endpoint: EndpointId,
        tier: CacheTier,
        group: int,
        root: Root,
        prompt: list[int],
        start: int,
        count: int,
        rarely: int,
    ) -> None:
        """By name, so that what the full group says, before or after, tells the content."""
        if rarely and group not in self.naive[endpoint].windows:
            return
        names = self.names(endpoint, 0, root, prompt)[start : start + count]
        event = BlockStored(
            tier,
            tuple(names),
            None,
            None,
            0,
            group_kind="sliding_window",
            group_idx=group,
            group_window_tokens=WINDOWS[group],
        )
        self.index.apply(endpoint, [event])
        for name in names:
            self.naive[endpoint].store_in_group(group, WINDOWS[group], name, tier)
        if not names:
            self.naive[endpoint].windows[group] = WINDOWS[group]

    @rule(data=st.data(), endpoint=endpoints)
    def remove_from_group(self, data: st.DataObject, endpoint: EndpointId) -> None:
        held = sorted(copy for copy, count in self.naive[endpoint].group_copies.items() if count)
        if held:
            group, name, tier = data.draw(st.sampled_from(held))
            self.index.apply(endpoint, [BlockRemoved(tier, (EngineBlockHash(name),), group)])
            self.naive[endpoint].remove_from_group(group, name, tier)

    @rule(endpoint=endpoints)
    def dump_and_restore(self, endpoint: EndpointId) -> None:
        """Only where nothing waits: what waits is left out."""
        dump = self.index.dump(endpoint)
        if dump.complete:
            self.index.clear(endpoint)
            self.index.restore(endpoint, dump)

    @rule(data=st.data(), endpoint=endpoints, tier=tiers, store=st.booleans())
    def by_known_name(self, data: st.DataObject, endpoint: EndpointId, tier: CacheTier, store: bool) -> None:
        """A name that was said before, in a tier where it may or may not be held."""
        names = sorted({name for name, _ in self.naive[endpoint].copies})
        if not names:
            return
        name = EngineBlockHash(data.draw(st.sampled_from(names)))
        if store:
            self.index.apply(endpoint, [BlockStored(tier, (name,), None, None, 0)])
            self.naive[endpoint].store_by_name(name, tier)
        else:
            self.index.apply(endpoint, [BlockRemoved(tier, (name,))])
            self.naive[endpoint].remove(name, tier)

    @rule(data=st.data(), endpoint=endpoints)
    def remove_a_held_copy(self, data: st.DataObject, endpoint: EndpointId) -> None:
        held = sorted(copy for copy, count in self.naive[endpoint].copies.items() if count)
        if held:
            name, tier = data.draw(st.sampled_from(held))
            self.index.apply(endpoint, [BlockRemoved(tier, (EngineBlockHash(name),))])
            self.naive[endpoint].remove(name, tier)

    @rule(endpoint=endpoints, tier=tiers, prompt=prompts)
    def store_scrambled(self, endpoint: EndpointId, tier: CacheTier, prompt: list[int]) -> None:
        """One event a block, the last block first: every one of them waits for its parent."""
        size = SIZES[endpoint]
        names = self.names(endpoint, 0, (None, None), prompt)
        for i in reversed(range(len(names))):
            block = prompt[i * size : (i + 1) * size]
            parent = names[i - 1] if i else None
            event = BlockStored(
                tier, (names[i],), parent, block, size, extra_keys=(None,), has_extra_keys=True
            )
            self.index.apply(endpoint, [event])
            self.naive[endpoint].store(names[i], parent, (None, None), tuple(block), tier)
        self.naive[endpoint].block_size_tokens = size

    @rule(endpoint=endpoints, rarely=st.integers(0, 3))
    def all_cleared(self, endpoint: EndpointId, rarely: int) -> None:
        if rarely:
            return
        self.index.apply(endpoint, [AllBlocksCleared()])
        self.naive[endpoint] = NaiveEndpoint()

    @rule(endpoint=endpoints, rarely=st.integers(0, 3))
    def replace_endpoint(self, endpoint: EndpointId, rarely: int) -> None:
        if rarely:
            return
        self.index.remove_endpoint(endpoint)
        self.index.add_endpoint(endpoint)
        self.naive[endpoint] = NaiveEndpoint()

    @rule(blocks=st.integers(0, 4))
    def sweep(self, blocks: int) -> None:
        self.index.sweep(blocks)

    @rule(root=roots, prompt=prompts)
    def match(self, root: Root, prompt: list[int]) -> None:
        found = self.index.depths(PrefixQuery(prompt, *root), ENDPOINTS)
        assert found == {e: naive.depths(root, prompt) for e, naive in self.naive.items()}

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()

    @invariant()
    def claims_are_counted(self) -> None:
        for endpoint, naive in self.naive.items():
            stats = self.index.stats(endpoint)
            resolved = [
                tier for (name, tier), n in naive.copies.items() if n and naive.content(name) is not None
            ]
            assert stats.device_blocks == resolved.count(CacheTier.DEVICE)
            assert stats.cpu_blocks == resolved.count(CacheTier.CPU)

    def teardown(self) -> None:
        for endpoint in ENDPOINTS:
            self.index.remove_endpoint(endpoint)
        while self.index.sweep(1_000):
            pass
        self.index.check_integrity()
        assert len(self.index) == 0


SETTINGS = settings(max_examples=100, stateful_step_count=60, deadline=None)
_compiled = available_indexes().get(COMPILED)


class CompiledIndexMachine(IndexMachine):
    make_index = cast("type[PythonPrefixIndex]", _compiled or PythonPrefixIndex)


IndexMachine.TestCase.settings = SETTINGS
CompiledIndexMachine.TestCase.settings = SETTINGS
TestIndexAgainstNaive = IndexMachine.TestCase
TestCompiledIndexAgainstNaive = pytest.mark.skipif(
    _compiled is None, reason="the compiled index is not built here"
)(CompiledIndexMachine.TestCase)


def test_the_naive_model_counts_a_hole_and_its_refill() -> None:
    """The yardstick itself: a hole ends the prefix, a refill restores the whole depth."""
    naive = NaiveEndpoint(block_size_tokens=1)
    for i in range(5):
        naive.store(i + 1, i or None, (None, None), (i,), CacheTier.DEVICE)
    naive.remove(3, CacheTier.DEVICE)
    assert naive.depths((None, None), [0, 1, 2, 3, 4]) == Depths(2, 2, 0)
    naive.store_by_name(3, CacheTier.DEVICE)
    assert naive.depths((None, None), [0, 1, 2, 3, 4]) == Depths(5, 5, 0)
