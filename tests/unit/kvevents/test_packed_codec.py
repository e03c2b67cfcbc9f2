"""What the compiled decoder packs and what it leaves to the codec. That both agree: `test_codec`,
`test_event_fuzz`."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from benchmarks.event_inputs import recorded_payloads
from engine_plugin.identity import EndpointId
from epp import kvevents
from epp.core.cache_view import CacheView
from epp.core.events import Applied, BlockStored, EventBatch
from epp.core.index_choice import COMPILED, PURE, IndexMaker, available_indexes
from epp.core.packed_events import PackedBatch
from epp.core.prefix_index import Depths, PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash
from epp.kvevents import codec
from epp.kvevents.packed_codec import choose_decoder, make_packed_decoder

pytestmark = pytest.mark.skipif(
    COMPILED not in available_indexes(), reason="the compiled decoder is not built here"
)
A = EndpointId("a")
SEED = b"p" * 16
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 70_000, 4],
    "block_size": 2,
    "medium": "GPU",
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"}


def decode(*events: Any) -> PackedBatch:
    batch = make_packed_decoder()(msgspec.msgpack.encode([1.5, list(events), 0]))
    assert isinstance(batch, PackedBatch)
    return batch


@pytest.mark.parametrize(
    "event",
    [
        STORED,
        REMOVED,
        {"type": "AllBlocksCleared"},
        ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2],
        ["BlockRemoved", [1], "CPU"],
        {**STORED, "block_hashes": [b"\x07" * 32, -5], "parent_block_hash": b"\x01" * 8},
        {**STORED, "lora_name": "tuned", "lora_id": 3},
        {**STORED, "medium": "CPU", "token_ids": None, "block_size": 0, "extra_keys": None},
        {**STORED, "kv_cache_spec_kind": "mla_attention", "group_idx": 7},
        {
            **STORED,
            "kv_cache_spec_kind": "sliding_window",
            "group_idx": 1,
            "kv_cache_spec_sliding_window": 128,
        },
        {**STORED, "kv_cache_spec_kind": "sliding_window_mla", "kv_cache_spec_sliding_window": (1 << 31) - 1},
        {**STORED, "kv_cache_spec_kind": "sliding_window"},
        {**STORED, "kv_cache_spec_sliding_window": 128},
        {**STORED, "later": {"a": [1, 2]}},
    ],
)
def test_usual_events_are_packed(event: Any) -> None:
    batch = decode(event)
    assert batch.others == ()
    assert batch.events == codec.decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).events


@pytest.mark.parametrize(
    "event",
    [
        {**STORED, "extra_keys": [["salt"], None]},
        {**STORED, "extra_keys": [[], None]},
        {**STORED, "lora_id": 3},
        {**STORED, "kv_cache_spec_kind": "mamba"},
        {**STORED, "kv_cache_spec_kind": None, "group_idx": 1},
        {**STORED, "kv_cache_spec_sliding_window": 0},
        {**STORED, "kv_cache_spec_sliding_window": -1},
        {**STORED, "kv_cache_spec_sliding_window": 1 << 31},
        {**STORED, "medium": "DISK"},
        {**STORED, "later": [[[[[[[[[]]]]]]]]]},
        {"block_hashes": [1], "type": "BlockRemoved"},
        {"type": "Future"},
    ],
)
def test_rare_events_are_left_to_the_codec(event: Any) -> None:
    batch = decode(STORED, event)
    assert len(batch.others) == 1
    plain = codec.decode_batch(msgspec.msgpack.encode([1.5, [STORED, event], 0]))
    assert (batch.events, batch.unknown_events) == (plain.events, plain.unknown_events)
    assert batch.event_count == len(plain.events)


@pytest.mark.parametrize("implementation", [PURE, COMPILED])
def test_both_forms_of_a_recorded_stream_fill_either_index_alike(implementation: str) -> None:
    packed, plain = (available_indexes()[implementation](SEED) for _ in range(2))
    packed.add_endpoint(A)
    plain.add_endpoint(A)
    decoder = make_packed_decoder()
    for payload in recorded_payloads():
        assert packed.apply_batch(A, decoder(payload)) == plain.apply_batch(A, codec.decode_batch(payload))
        assert packed.stats(A) == plain.stats(A)
        packed.check_integrity()
    assert packed.stats(A).device_blocks + packed.stats(A).cpu_blocks > 0


def filled(make: IndexMaker) -> Any:
    index = make(SEED)
    index.add_endpoint(A)
    return index


def test_packed_events_meet_what_only_python_keeps() -> None:
    """Orphans that wait, names that wait for content, removals of both, in packed form throughout."""
    child = {**STORED, "block_hashes": [13], "parent_block_hash": 12, "token_ids": [5, 6], "extra_keys": None}
    by_name = {**STORED, "block_hashes": [13, 14], "token_ids": [], "medium": "CPU"}
    pure, compiled = filled(available_indexes()[PURE]), filled(available_indexes()[COMPILED])
    for events in (
        [STORED],  # learns the block size
        [{**REMOVED, "block_hashes": [11, 12]}],
        [{"type": "AllBlocksCleared"}],
        [child],  # before its parent, and before the size is learned anew
        [by_name, {**REMOVED, "block_hashes": [14], "medium": "CPU"}, child],
        [STORED],
        [{**REMOVED, "block_hashes": [13, 13, 99]}],
    ):
        batch = decode(*events)
        assert compiled.apply_batch(A, batch) == pure.apply_batch(A, batch)
        assert compiled.stats(A) == pure.stats(A)
        compiled.check_integrity()
    query = PrefixQuery([1, 2, 70_000, 4, 5, 6])
    assert compiled.depths(query, [A])[A] == pure.depths(query, [A])[A] == Depths(3, 2, 0)


def test_a_learned_size_beyond_64_bits_is_only_another_size() -> None:
    """Events that were not decoded from bytes may have any number."""
    for make in available_indexes().values():
        index = filled(make)
        huge = BlockStored(CacheTier.DEVICE, (EngineBlockHash(1),), None, [1], 1)
        index.apply(A, [huge])
        index._endpoints[A].blocks.block_size_tokens = 2**70
        assert index.apply_batch(A, decode(STORED)) == Applied(skipped_blocks=2)


def test_spans_outside_the_arrays_are_refused() -> None:
    """A packed batch is made by us; that it is not believed blindly costs two comparisons an event."""
    batch = decode(STORED)
    index = filled(available_indexes()[COMPILED])
    for broken in (batch._replace(names=b""), batch._replace(tokens=batch.tokens[:4])):
        with pytest.raises(RuntimeError, match="packed"):
            index.apply_batch(A, broken)
    index.check_integrity()


def test_a_view_counts_batches_of_one_step_together() -> None:
    """Held back during a replay, then applied at once: both forms count the same."""
    view = CacheView(available_indexes()[COMPILED](SEED))
    view.add_endpoint(A, has_replay=True)
    view.on_connect(A, 0.0)
    plain = codec.decode_batch(msgspec.msgpack.encode([1.5, [REMOVED], 0]))
    assert isinstance(plain, EventBatch)
    view.on_batch(A, 0, decode(STORED), 0.0)
    view.on_batch(A, 1, plain, 0.0)
    applied = view.on_replay_end(A, True, 0.0)
    assert applied == Applied(stored_blocks=2, removed_blocks=1)
    assert view.stats(A).counters.applied_batches == 2


def test_the_decoder_suits_the_index() -> None:
    assert choose_decoder(COMPILED).implementation == COMPILED
    assert choose_decoder(PURE).decode is codec.decode_batch


def test_a_decoder_that_is_not_built_is_said_and_the_codec_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kvevents, "_compiled_scan", raising=False)
    monkeypatch.setitem(sys.modules, "epp.kvevents._compiled_scan", None)
    choice = choose_decoder(COMPILED)
    assert (choice.implementation, choice.decode) == (PURE, codec.decode_batch)
    assert choice.reason.startswith("the compiled decoder of KV events cannot be loaded: ")
    assert choose_decoder(PURE) == (PURE, codec.decode_batch, "")
