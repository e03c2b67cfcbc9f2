"""Block keys: the same from lists and buffers, keyed, rooted, and never for what is not understood."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from xxhash import xxh3_64_intdigest

from epp.core.hashing import (
    BlockHasher,
    InvalidTokens,
    encode_extra_keys,
    pack_tokens,
    split_extra_keys,
)
from epp.core.index_choice import IndexMaker
from epp.core.prefix_index import PrefixIndex, PythonPrefixIndex
from epp.core.types import BlockKey, EngineBlockHash

HASHER = BlockHasher(bytes(range(16)))


def prompt_keys(tokens: list[int], size: int) -> list[BlockKey]:
    return HASHER.chain(HASHER.root("", None, None), pack_tokens(tokens), size)


PROMPT = [7, 8, 9, 10, 11, 12, 13, 14]
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_seed_must_have_128_bits() -> None:
    with pytest.raises(ValueError, match="needs 16"):
        BlockHasher(b"short")


@given(token_lists, st.integers(1, 5))
def test_a_key_chains_its_block_to_the_key_before_it(tokens: list[int], size: int) -> None:
    keys = prompt_keys(tokens, size)
    assert len(keys) == len(tokens) // size
    parent = int(HASHER.root("", None, None))
    for i, key in enumerate(keys):
        raw = b"".join(t.to_bytes(4, "little") for t in tokens[i * size : (i + 1) * size])
        parent = xxh3_64_intdigest(raw, parent)
        assert key == parent


@given(token_lists)
def test_every_container_packs_alike(tokens: list[int]) -> None:
    expected = b"".join(t.to_bytes(4, "little") for t in tokens)
    buffer = np.array(tokens, dtype=np.uint32)
    wide = array("Q", tokens)
    for container in (tokens, tuple(tokens), array("I", tokens), memoryview(buffer), wide, memoryview(wide)):
        assert pack_tokens(container) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["1"], [None], [1.0], b"\x01\x02\x03\x04", "12"])
def test_what_is_no_token_list_is_refused_without_showing_it(tokens: object) -> None:
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens(tokens)  # type: ignore[arg-type]
    assert "4294967296" not in str(caught.value)


def test_keys_depend_on_seed_model_adapter_and_salt() -> None:
    roots = {
        BlockHasher(seed).root(model, lora, salt)
        for seed in (b"a" * 16, b"b" * 16)
        for model in ("", "m")
        for lora in (None, "", "x")
        for salt in (None, "", "x")
    }
    assert len(roots) == 2 * 2 * 3 * 3


def test_a_shared_prefix_has_shared_keys_and_nothing_after_it() -> None:
    other = [*PROMPT[:4], 99, *PROMPT[5:]]
    ours, theirs = prompt_keys(PROMPT, 2), prompt_keys(other, 2)
    assert ours[:2] == theirs[:2]
    assert not set(ours[2:]) & set(theirs[2:])


def test_adapter_name_is_not_read_as_a_picture_and_the_salt_is_found() -> None:
    assert split_extra_keys(("lora", "pic", "salt"), "lora", True) == ("salt", ("pic",))
    assert split_extra_keys(("lora",), "lora", True) == (None, ())
    assert split_extra_keys(("lora", "pic"), "lora", False) == (None, ("pic",))
    assert split_extra_keys((("pic", 3),), None, True) == (None, (("pic", 3),))
    assert split_extra_keys(None, None, True) == (None, ())


keys = st.recursive(
    st.text(max_size=3) | st.binary(max_size=3) | st.integers(), lambda k: st.tuples(k, k), max_leaves=3
)


@given(st.lists(keys, max_size=3), st.lists(keys, max_size=3))
def test_extra_keys_are_encoded_without_ambiguity(left: list[object], right: list[object]) -> None:
    a, b = encode_extra_keys(tuple(left)), encode_extra_keys(tuple(right))
    assert a is not None
    assert (a == b) == (left == right)


@pytest.mark.parametrize("key", [None, 1.5, True, {"a": 1}, object(), ("a", None), ((((("deep",),),),),)])
def test_an_extra_key_of_unknown_type_has_no_encoding(key: object) -> None:
    assert encode_extra_keys(("known", key)) is None


@pytest.mark.parametrize("huge", [-1, 2**64, 2**64 + 5, -(2**255), 2**512])
def test_a_name_that_does_not_fit_gets_64_bits_that_only_this_seed_knows(
    make_index: IndexMaker, huge: int
) -> None:
    first, again, other = (hasher_of(make_index(bytes([seed]) * 16)) for seed in (1, 1, 2))
    name = first.name(EngineBlockHash(huge))
    assert 0 <= name < 2**64
    assert name == again.name(EngineBlockHash(huge)) != other.name(EngineBlockHash(huge))
    assert first.names((EngineBlockHash(3), EngineBlockHash(huge))) == (3, name)


@pytest.mark.parametrize("fits", [0, 1, 2**63, 2**64 - 1])
def test_a_name_that_fits_stays_itself(make_index: IndexMaker, fits: int) -> None:
    names = (EngineBlockHash(fits),)
    hasher = hasher_of(make_index(bytes(16)))
    assert hasher.name(names[0]) == fits
    assert hasher.names(names) is names


def hasher_of(index: PrefixIndex) -> BlockHasher:
    assert isinstance(index, PythonPrefixIndex)
    return index._hasher
