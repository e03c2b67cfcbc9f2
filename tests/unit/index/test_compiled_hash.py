"""Keys of the compiled index: keyed, chained, unambiguous, and no two alike on structured input."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epp.core.hashing import BlockHasher, pack_tokens
from epp.core.types import BlockKey

compiled = pytest.importorskip(
    "epp.core._compiled_index", reason="the compiled index is not built here", exc_type=ImportError
)
SEED = bytes(range(16))
HASHER: BlockHasher = compiled.CompiledHasher(SEED)
ROOT = BlockKey(7)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 9))
def test_a_chain_is_its_blocks_one_after_the_other(tokens: list[int], size: int) -> None:
    parent = HASHER.root("", None, None)
    keys = HASHER.chain(parent, pack_tokens(tokens), size)
    assert len(keys) == len(tokens) // size
    for i, key in enumerate(keys):
        raw = b"".join(t.to_bytes(4, "little") for t in tokens[i * size : (i + 1) * size])
        parent = HASHER.next_key(parent, raw)
        assert key == parent


@given(st.binary(max_size=200), st.data())
def test_any_changed_bit_changes_the_key(block: bytes, data: st.DataObject) -> None:
    key = HASHER.next_key(ROOT, block)
    assert HASHER.next_key(BlockKey(ROOT ^ 1 << data.draw(st.integers(0, 63))), block) != key
    assert HASHER.next_key(ROOT, block + b"\0") != key
    if block:
        at = data.draw(st.integers(0, len(block) * 8 - 1))
        changed = bytearray(block)
        changed[at // 8] ^= 1 << at % 8
        assert HASHER.next_key(ROOT, bytes(changed)) != key


def test_structured_blocks_have_keys_of_their_own() -> None:
    """Zeros of every length, single tokens, repeated tokens, two tokens: 70,000 keys."""
    blocks = {b"\0" * n for n in range(300)}
    blocks |= {t.to_bytes(4, "little") * n for t in range(500) for n in (1, 4, 8, 16, 32)}
    for at in range(16):
        blocks |= {b"\0" * 4 * at + t.to_bytes(4, "little") + b"\0" * 4 * (15 - at) for t in range(4_200)}
    keys = {HASHER.next_key(ROOT, block) for block in blocks}
    assert len(keys) == len(blocks) > 65_000


def test_every_output_bit_depends_on_the_input() -> None:
    keys = [HASHER.next_key(ROOT, n.to_bytes(64, "little")) for n in range(4_096)]
    for bit in range(64):
        assert 1_800 < sum(key >> bit & 1 for key in keys) < 2_300


def test_keys_are_secret_to_the_seed() -> None:
    other = compiled.CompiledHasher(b"\1" + SEED[1:])
    assert other.next_key(ROOT, bytes(64)) != HASHER.next_key(ROOT, bytes(64))
    with pytest.raises(ValueError, match="needs 16"):
        compiled.CompiledPrefixIndex(b"short")
