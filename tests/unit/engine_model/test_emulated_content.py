"""The emulated engine's bytes and names: functions of tokens, however cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.engine.content import Content, SeedChain, digest, draw
from deploy.local.engine.hashing import Block, BlockHasher, event_hash
from deploy.local.engine.memory import Compute, KvMemory, Move

BLOCK = 4
ROW_BYTES = 64
tokens_lists = st.lists(st.integers(0, 8191), min_size=1, max_size=60)


def seeds_of(tokens: list[int], *cuts: int) -> SeedChain:
    chain = SeedChain()
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        chain.extend(tokens[start:stop])
    return chain


@given(tokens=tokens_lists, data=st.data())
def test_seeds_do_not_depend_on_how_the_prompt_arrives(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    whole, parts = seeds_of(tokens), seeds_of(tokens, cut)
    assert np.array_equal(whole.slice(0, len(tokens)), parts.slice(0, len(tokens)))
    assert len(parts) == len(tokens)


@given(tokens=tokens_lists, data=st.data())
def test_a_changed_token_changes_every_later_seed_and_no_earlier_one(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    count = len(tokens)
    same = seeds_of(tokens).slice(0, count) == seeds_of(other).slice(0, count)
    assert same.tolist() == [True] * at + [False] * (count - at)


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), data=st.data())
def test_digests_of_adjacent_ranges_add_up(words: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(words)))
    array = np.array(words, dtype=np.uint64)
    total = (digest(array[:cut], 10) + digest(array[cut:], 10 + cut)) % 2**64
    assert total == digest(array, 10)


def test_digest_depends_on_order() -> None:
    array = np.array([1, 2], dtype=np.uint64)
    assert digest(array, 0) != digest(array[::-1], 0)
    assert draw(1) != draw(2)


@pytest.fixture
def memory() -> KvMemory:
    cpu = np.zeros((8, BLOCK * ROW_BYTES), dtype=np.uint8)
    content = Content(model="m", kv_bytes_per_token=ROW_BYTES)
    return KvMemory(device_slots=8, block_size=BLOCK, content=content, cpu=cpu)


def compute(memory: KvMemory, slots: list[int], tokens: list[int], moves: list[Move], cut: int = 0) -> int:
    """Summary of a whole prompt, computed in two parts where `cut` is given."""
    seeds = seeds_of(tokens)
    spans = [(0, cut), (cut, len(tokens))] if cut else [(0, len(tokens))]
    parts = [
        Compute(slots, start, stop, seeds.slice(start, stop), moves if stop == len(tokens) else (), start)
        for start, stop in spans
    ]
    return sum(memory.step(parts)) % 2**64


def test_summary_is_the_same_wherever_and_however_it_was_computed(memory: KvMemory) -> None:
    tokens = list(range(11))
    first = compute(memory, [0, 1, 2], tokens, [])
    assert compute(memory, [7, 3, 5], tokens, [], cut=6) == first
    assert compute(memory, [0, 1, 2], [*tokens[:-1], 99], []) != first


def test_restored_blocks_are_compared_byte_by_byte(memory: KvMemory) -> None:
    tokens = list(range(12))
    compute(memory, [0, 1, 2], tokens, [Move(0, 4), Move(1, 2), Move(2, 6)])
    seeds = seeds_of(tokens).slice(0, 12)
    moves = [Move(5, 4), Move(6, 2), Move(7, 6)]
    assert memory.restore(moves, seeds) == 3
    assert np.array_equal(memory.device[5:8], memory.device[0:3])
    swapped = [Move(5, 2), Move(6, 4), Move(7, 6)]
    assert memory.restore(swapped, seeds) == 0


@pytest.mark.parametrize("at", [0, BLOCK * ROW_BYTES // 2, BLOCK * ROW_BYTES - 1])
def test_one_flipped_bit_anywhere_in_a_block_is_found(at: int) -> None:
    cpu = np.zeros((8, BLOCK * ROW_BYTES), dtype=np.uint8)
    content = Content(model="m", kv_bytes_per_token=ROW_BYTES)
    memory = KvMemory(device_slots=8, block_size=BLOCK, content=content, cpu=cpu)
    tokens = list(range(8))
    compute(memory, [0, 1], tokens, [Move(0, 0), Move(1, 1)])
    cpu[1, at] ^= 128
    assert memory.restore([Move(2, 0), Move(3, 1)], seeds_of(tokens).slice(0, 8)) == 1


def chain(
    tokens: list[int], *, seed: str = "0", salt: str | None = None, lora: str | None = None
) -> list[Block]:
    blocks: list[Block] = []
    hasher = BlockHasher(block_size=BLOCK, seed=seed, algorithm="sha256")
    hasher.extend(blocks, tokens, salt=salt, lora_name=lora)
    return blocks


@given(tokens=tokens_lists, data=st.data())
def test_a_chain_grows_as_if_it_had_been_made_at_once(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    blocks: list[Block] = []
    hasher = BlockHasher(block_size=BLOCK, seed="0", algorithm="sha256")
    for length in (cut, len(tokens)):
        hasher.extend(blocks, tokens[:length], salt=None, lora_name=None)
    assert blocks == chain(tokens)
    assert len(blocks) == len(tokens) // BLOCK
    assert [block.parent for block in blocks[1:]] == [block.name for block in blocks[:-1]]


def test_names_differ_by_seed_salt_adapter_algorithm_and_prefix() -> None:
    tokens = list(range(8))
    chains = [
        chain(tokens),
        chain(tokens, seed="1"),
        chain(tokens, salt="a"),
        chain(tokens, salt="b"),
        chain(tokens, lora="a"),
        chain([9, *tokens[1:]]),
    ]
    other: list[Block] = []
    BlockHasher(block_size=BLOCK, seed="0", algorithm="blake2b").extend(
        other, tokens, salt=None, lora_name=None
    )
    names = {block.name for blocks in (*chains, other) for block in blocks}
    assert len(names) == 14
    assert len({event_hash(name) for name in names}) == 14
    assert all(len(name) == 32 for name in names)


def test_salt_is_an_extra_key_of_the_first_block_and_the_adapter_of_all() -> None:
    keys = [block.extra_keys for block in chain(list(range(8)), salt="s", lora="l")]
    assert keys == [("l", "s"), ("l",)]


@pytest.mark.parametrize("kv_bytes", [0, 4, 12])
def test_rows_must_be_whole_words(kv_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Content(model="m", kv_bytes_per_token=kv_bytes)
