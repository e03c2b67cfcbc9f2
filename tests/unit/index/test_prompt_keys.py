"""A look-up that also gives the prompt's keys: the keys of the whole prompt, and the same depths."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine_plugin.identity import EndpointId
from epp.core.events import BlockStored
from epp.core.hashing import Family, InvalidTokens, PromptKeys
from epp.core.index_choice import IndexMaker, available_indexes
from epp.core.prefix_index import PrefixIndex, PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash

FOUR, ALSO_FOUR, THREE, OTHER, NEW = (EndpointId(name) for name in ("four", "also", "three", "other", "new"))
ALL = [FOUR, ALSO_FOUR, THREE, OTHER, NEW]
PROMPT = list(range(1_000, 1_303))


def filled(make_index: IndexMaker) -> PrefixIndex:
    """Endpoints of three families, and one whose block size nobody knows yet."""
    index = make_index(b"k" * 16)
    for endpoint in ALL:
        index.add_endpoint(endpoint, "other" if endpoint == OTHER else "")
    for endpoint, size, blocks in ((FOUR, 4, 70), (ALSO_FOUR, 4, 2), (THREE, 3, 5), (OTHER, 4, 1)):
        hashes = tuple(EngineBlockHash(i + 1) for i in range(blocks))
        index.apply(endpoint, [BlockStored(CacheTier.DEVICE, hashes, None, PROMPT[: size * blocks], size)])
    return index


def keys_of(index: PrefixIndex, query: PrefixQuery) -> dict[Family, PromptKeys]:
    keys: dict[Family, PromptKeys] = {}
    assert index.depths(query, ALL, keys) == index.depths(query, ALL)
    return keys


def test_every_family_has_the_keys_of_the_whole_prompt(make_index: IndexMaker) -> None:
    index = filled(make_index)
    keys = keys_of(index, PrefixQuery(PROMPT))
    assert {family: len(found) for family, found in keys.items()} == {
        ("", 4): 75,
        ("", 3): 101,
        ("other", 4): 75,
    }
    assert all(isinstance(found, array) and found.typecode == "Q" for found in keys.values())
    every = [key for found in keys.values() for key in found]
    assert len(set(every)) == len(every)
    assert index.depths(PrefixQuery(PROMPT), [FOUR])[FOUR].blocks == 70


def test_keys_do_not_depend_on_who_holds_what(make_index: IndexMaker) -> None:
    """Also where the walk ends at the first block."""
    index = filled(make_index)
    unseen = [7, *PROMPT]
    keys = keys_of(index, PrefixQuery(unseen))
    hashes = tuple(EngineBlockHash(10_000 + i) for i in range(76))
    index.apply(ALSO_FOUR, [BlockStored(CacheTier.DEVICE, hashes, None, unseen, 4)])
    assert keys_of(index, PrefixQuery(unseen)) == keys
    assert index.depths(PrefixQuery(unseen), [ALSO_FOUR])[ALSO_FOUR].blocks == 76


def test_salt_and_adapter_are_in_the_keys(make_index: IndexMaker) -> None:
    index = filled(make_index)
    queries = [PrefixQuery(PROMPT), PrefixQuery(PROMPT, "adapter"), PrefixQuery(PROMPT, None, "salt")]
    first = [keys_of(index, query)["", 4] for query in queries]
    assert not set(first[0]) & set(first[1])
    assert not set(first[0]) & set(first[2])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_less_than_a_block_has_no_keys(make_index: IndexMaker, tokens: list[int]) -> None:
    assert keys_of(filled(make_index), PrefixQuery(tokens)) == {
        ("", 4): array("Q"),
        ("", 3): array("Q"),
        ("other", 4): array("Q"),
    }


def test_tokens_that_no_engine_has_have_no_keys(make_index: IndexMaker) -> None:
    keys: dict[Family, PromptKeys] = {}
    with pytest.raises(InvalidTokens):
        filled(make_index).depths(PrefixQuery([-1, 2, 3, 4]), ALL, keys)
    assert keys == {}


@pytest.mark.parametrize("name", sorted(available_indexes()))
@given(tokens=st.lists(st.integers(0, 3), max_size=30), other=st.lists(st.integers(0, 3), max_size=30))
def test_equal_keys_are_equal_prefixes(name: str, tokens: list[int], other: list[int]) -> None:
    """What the placement tree's bisection rests on."""
    index = filled(available_indexes()[name])
    mine, theirs = (keys_of(index, PrefixQuery(t))["", 3] for t in (tokens, other))
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        assert (a == b) == (tokens[: 3 * (i + 1)] == other[: 3 * (i + 1)])
