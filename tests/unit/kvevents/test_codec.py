"""The wire form: both encodings, both framings, a recorded engine, and whatever else bytes can be."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from benchmarks.fuzz_events import require_same, verdict
from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from epp.core.index_choice import COMPILED, available_indexes
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import CacheTier, ClaimState, SchedulingRequest
from epp.kvevents import codec, event_fields, extra_keys, framing
from epp.kvevents.framing import CodecError, Message
from epp.kvevents.packed_codec import make_packed_decoder

RECORDED = Path(__file__).parents[2] / "data" / "kv_events" / "vllm-0.32.jsonl"
pack = msgspec.msgpack.encode
packed_decode = make_packed_decoder() if COMPILED in available_indexes() else None

STORED_MAP: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
STORED_LIST = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]


def decode_batch(payload: bytes) -> EventBatch:
    """The codec's verdict; where the compiled decoder is built, it has to say the same. So every test
    of this file is one of both."""
    if packed_decode is not None:
        require_same(verdict(packed_decode, payload), verdict(codec.decode_batch, payload))
    return codec.decode_batch(payload)


def decode(*events: Any) -> EventBatch:
    return decode_batch(pack([1.5, list(events), 0]))


def recorded() -> list[list[bytes]]:
    lines = RECORDED.read_text().splitlines()
    return [[bytes.fromhex(frame) for frame in json.loads(line)["frames_hex"]] for line in lines]


# --- a real engine -------------------------------------------------------------------------------


def test_recorded_messages_of_a_real_engine_apply_to_the_expected_blocks() -> None:
    view = CacheView(PythonPrefixIndex(b"r" * 16))
    endpoint = EndpointId("a")
    view.add_endpoint(endpoint, has_replay=False)
    prompts: list[list[int]] = []
    for frames in recorded()[:9]:
        message = framing.split_live(frames)
        assert message.seq is not None
        batch = decode_batch(message.payload)
        assert batch.unknown_events == 0
        view.on_batch(endpoint, message.seq, batch, 1.0)
        for event in batch.events:
            if isinstance(event, BlockStored) and event.tier is CacheTier.DEVICE and event.parent is None:
                prompts.append(list(event.token_ids or ()))
    stats = view.stats(endpoint)
    assert stats.state is ClaimState.LIVE
    counters = stats.counters
    assert (counters.stored_blocks, counters.removed_blocks) == (4 + 4 + 2 + 2 + 4 + 4 + 46 + 46 + 46, 24)
    assert (counters.orphan_blocks, counters.unresolved_blocks, counters.skipped_blocks) == (0, 0, 0)
    assert (stats.index.device_blocks, stats.index.cpu_blocks) == (78, 56)

    def match(tokens: list[int], salt: str | None = None) -> tuple[int, int, int]:
        request = SchedulingRequest("r", token_ids=tokens, cache_salt=salt)
        found = view.match(request, [endpoint])[endpoint]
        return found.blocks, found.device_blocks, found.cpu_blocks

    first, salted, third, fourth = prompts
    assert first == salted
    assert match(first) == (4, 0, 4)  # evicted from the device, still in CPU memory
    assert match(salted, "tenantA") == (4, 0, 4)
    assert match(first, "tenantB") == (0, 0, 0)
    assert match(third) == (46, 32, 46)
    assert match(fourth) == (46, 46, 0)


def test_recorded_all_cleared_and_what_follows() -> None:
    batches = [decode_batch(framing.split_live(frames).payload) for frames in recorded()[9:]]
    assert batches[0].events == (AllBlocksCleared(),)
    after = batches[1].events
    assert [type(e) for e in after] == [BlockStored, BlockRemoved] or [type(e) for e in after] == [
        BlockRemoved,
        BlockStored,
    ]
    (cpu,) = batches[2].events
    assert isinstance(cpu, BlockStored)
    assert (cpu.tier, cpu.has_extra_keys, cpu.block_size_tokens) == (CacheTier.CPU, False, 32)


def test_truncated_or_extended_recorded_payloads_never_decode_to_something_else() -> None:
    payload = framing.split_live(recorded()[4]).payload
    for length in range(len(payload)):
        with pytest.raises(CodecError):
            decode_batch(payload[:length])
    with pytest.raises(CodecError):
        decode_batch(payload + b"\x00")


# --- encodings -----------------------------------------------------------------------------------


def test_maps_lists_and_unknown_events_in_one_batch() -> None:
    """S-C02."""
    batch = decode(
        STORED_MAP,
        STORED_LIST,
        {"type": "FutureEvent", "x": [1]},
        ["OtherFutureEvent", 3],
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU", "later": {"a": 1}},
        ["BlockRemoved", [12]],
        {"type": "AllBlocksCleared"},
        ["AllBlocksCleared"],
    )
    assert batch.unknown_events == 2
    a, b, c, d, e, f = batch.events
    assert isinstance(a, BlockStored)
    assert isinstance(b, BlockStored)
    assert (a.hashes, a.parent, list(a.token_ids or ()), a.block_size_tokens) == (
        (11, 12),
        None,
        [1, 2, 3, 4],
        2,
    )
    assert (b.hashes, b.parent, list(b.token_ids or ()), b.block_size_tokens) == (
        (11, 12),
        None,
        [1, 2, 3, 4],
        2,
    )
    assert (a.has_extra_keys, b.has_extra_keys) == (True, False)
    assert a.group_kind == b.group_kind == "full_attention"
    assert c == BlockRemoved(CacheTier.CPU, (11,))  # type: ignore[arg-type]
    assert d == BlockRemoved(CacheTier.DEVICE, (12,))  # type: ignore[arg-type]
    assert e == f == AllBlocksCleared()


def test_fields_beyond_the_known_ones_are_ignored() -> None:
    longer = [*STORED_LIST, None, None, 0, "full_attention", None, "future", 99]
    batch = decode(longer, {**STORED_MAP, "locality": {"x": [1.5]}, "lookahead_token_ids": [1]})
    assert len(batch.events) == 2
    assert decode_batch(pack([1, [STORED_MAP], 0, "future", None])).events == batch.events[1:]
    assert decode_batch(pack([1, [STORED_MAP]])).events == batch.events[1:]


def test_hashes_may_be_ints_or_bytes_and_mean_the_same() -> None:
    """Raw form: the last eight bytes are what the int form shows."""
    raw = bytes(24) + (2**64 - 5).to_bytes(8, "big")
    (a,), (b,), (c,) = (
        decode({**STORED_MAP, "block_hashes": [h, 1], "parent_block_hash": h}).events
        for h in (2**64 - 5, raw, -5)
    )
    assert a == b == c
    assert isinstance(a, BlockStored)
    assert a.parent == 2**64 - 5


@pytest.mark.parametrize("tokens", [[], None])
def test_token_less_offload_stores(tokens: list[int] | None) -> None:
    """S-C12."""
    event = {**STORED_MAP, "token_ids": tokens, "block_size": 0, "medium": "CPU", "extra_keys": None}
    (stored,) = decode(event).events
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.tier, stored.has_extra_keys) == (None, CacheTier.CPU, False)


def test_tiers_we_do_not_know_are_counted_and_left_alone() -> None:
    batch = decode(
        {**STORED_MAP, "medium": "DISK"}, ["BlockRemoved", [1], "DISK"], {**STORED_MAP, "medium": None}
    )
    assert batch.unknown_events == 2
    assert [e.tier for e in batch.events if isinstance(e, BlockStored)] == [CacheTier.DEVICE]


def test_group_kinds_are_kept_and_never_guessed() -> None:
    def kind(**fields: Any) -> str:
        event = {k: v for k, v in STORED_MAP.items() if k not in ("group_idx", "kv_cache_spec_kind")}
        (stored,) = decode({**event, **fields}).events
        assert isinstance(stored, BlockStored)
        return stored.group_kind

    assert kind() == kind(group_idx=0) == "full_attention"
    assert kind(group_idx=1) == "unknown"
    assert kind(group_idx=1, kv_cache_spec_kind="mamba") == "mamba"


def test_the_window_of_a_group_is_read_in_both_encodings() -> None:
    as_map = {**STORED_MAP, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    as_list = [*STORED_LIST, None, None, 1, "sliding_window"]
    told = decode({**as_map, "kv_cache_spec_sliding_window": 1024}, [*as_list, 1024], as_map, as_list)
    assert told.unknown_events == 0
    assert [e.group_window_tokens for e in told.events if isinstance(e, BlockStored)] == [
        1024,
        1024,
        None,
        None,
    ]
    assert {(e.group_idx, e.group_kind) for e in told.events if isinstance(e, BlockStored)} == {
        (1, "sliding_window")
    }
    with pytest.raises(CodecError):
        decode({**as_map, "kv_cache_spec_sliding_window": "wide"})


def test_an_adapter_known_by_number_only_is_never_the_base_model() -> None:
    (stored,) = decode({**STORED_MAP, "lora_id": 3}).events
    assert isinstance(stored, BlockStored)
    assert stored.lora_name not in (None, "", "3")
    (named,) = decode({**STORED_MAP, "lora_id": 3, "lora_name": "tuned"}).events
    assert isinstance(named, BlockStored)
    assert named.lora_name == "tuned"


def test_extra_keys_of_every_kind() -> None:
    extra = [["salt", 5, b"raw", ["picture", 0]], [1.5], [None], [{"a": 1}], None, []]
    event = {**STORED_MAP, "block_hashes": list(range(6)), "token_ids": list(range(12)), "extra_keys": extra}
    (stored,) = decode(event).events
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys is not None
    assert stored.extra_keys[0] == ("salt", 5, b"raw", ["picture", 0])
    assert stored.extra_keys[4:] == (None, ())


@pytest.mark.parametrize(
    "event",
    [
        7,
        None,
        [],
        {},
        {"type": 3},
        {"type": "BlockStored"},
        ["BlockStored", [1]],
        {**STORED_MAP, "block_hashes": "x"},
        {**STORED_MAP, "block_hashes": [1.5]},
        {**STORED_MAP, "block_hashes": [b""]},
        {**STORED_MAP, "block_hashes": [bytes(65)]},
        {**STORED_MAP, "token_ids": [-1, 2, 3, 4]},
        {**STORED_MAP, "token_ids": [2**32, 2, 3, 4]},
        {**STORED_MAP, "token_ids": ["a"]},
        {**STORED_MAP, "block_size": -1},
        {**STORED_MAP, "block_size": 2**40},
        {**STORED_MAP, "extra_keys": 5},
        {**STORED_MAP, "parent_block_hash": []},
        {"type": "BlockRemoved", "block_hashes": None},
    ],
)
def test_known_events_with_wrong_fields_lose_the_batch(event: Any) -> None:
    with pytest.raises(CodecError) as caught:
        decode(STORED_MAP, event)
    assert caught.value.reason == "event"


HUGE = b"\xdd\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        HUGE,
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + HUGE,
        b"\x93\xcb" + bytes(8) + b"\x91" + HUGE,
        b"\x93\xcb" + bytes(8) + b"\x91\x93\xabBlockStored" + HUGE,
        b"\x93\xcb" + bytes(8) + b"\x91\x92\xacBlockRemoved" + b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\x91" * 100_000 + b"\xc0",
        b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xa6Future\xa1x" + b"\x91" * 50_000 + b"\xc0",
        bytes(event_fields.MAX_PAYLOAD_BYTES + 1),
        pack([0.0, [["AllBlocksCleared"]] * (event_fields.MAX_EVENTS + 1), 0]),
        pack("text"),
        pack({"ts": 1}),
        pack(["now", [], 0]),
        pack([1.0, {}, 0]),
    ],
)
def test_hostile_payloads_give_one_kind_of_error(payload: bytes) -> None:
    with pytest.raises(CodecError):
        decode_batch(payload)


def test_the_digest_names_the_payload() -> None:
    assert decode(STORED_MAP).digest == decode(STORED_MAP).digest
    assert decode_batch(pack([2.5, [STORED_MAP], 0])).digest != decode(STORED_MAP).digest


# --- framing -------------------------------------------------------------------------------------

SEQ = (5).to_bytes(8, "big")


def test_both_framings_and_the_end_marker() -> None:
    """S-C03."""
    assert framing.split_live([b"topic", SEQ, b"p"]) == framing.split_live([SEQ, b"p"]) == Message(5, b"p")
    for frames in ([SEQ, b"p"], [b"", SEQ, b"p"], [b"t", SEQ, b"p"], [b"", b"t", SEQ, b"p"]):
        assert framing.split_replayed(frames) == Message(5, b"p")
        assert not framing.is_end_of_replay(frames)
    for frames in ([framing.END_OF_REPLAY, b""], [b"", framing.END_OF_REPLAY, b""]):
        assert framing.split_replayed(frames).seq is None
        assert framing.is_end_of_replay(frames)
    assert framing.replay_request(5) == [b"", SEQ]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frames"),
        ([b"p"], "frames"),
        ([b"", b"t", SEQ, b"p"], "frames"),
        ([b"t", SEQ[:4], b"p"], "sequence"),
        ([b"t", b"\x80" + bytes(7), b"p"], "sequence"),
        ([b"t", framing.END_OF_REPLAY, b""], "sequence"),
    ],
)
def test_messages_of_another_shape_are_refused_with_a_reason(frames: list[bytes], reason: str) -> None:
    """S-C17."""
    with pytest.raises(CodecError) as caught:
        framing.split_live(frames)
    assert caught.value.reason == reason


def test_a_payload_over_the_limit_is_an_unreadable_batch_with_a_sequence() -> None:
    """Not a message without one: what it removed must be found missing at once."""
    payload = bytes(event_fields.MAX_PAYLOAD_BYTES + 1)
    assert framing.split_live([b"t", SEQ, payload]) == Message(5, payload)
    for decoder in (codec.decode_batch, packed_decode or codec.decode_batch):
        with pytest.raises(CodecError) as caught:
            decoder(payload)
        assert caught.value.reason == "size"


# --- fuzz ----------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU", "type"])
)
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=8) | st.dictionaries(st.text(max_size=4), v, max_size=4),
    max_leaves=30,
)
near_events = st.builds(
    lambda change, key: {**STORED_MAP, key: change}, values, st.sampled_from(list(STORED_MAP))
) | st.builds(
    lambda change, at: [*STORED_LIST[:at], change, *STORED_LIST[at + 1 :]], values, st.integers(0, 6)
)


def survives(payload: bytes) -> None:
    """Decodes or says CodecError; what decodes can be applied without upsetting the index."""
    try:
        batch = decode_batch(payload)
    except CodecError:
        return
    index = PythonPrefixIndex(b"f" * 16)
    index.add_endpoint(EndpointId("a"))
    index.apply(EndpointId("a"), batch.events)
    index.check_integrity()


@given(st.lists(near_events | values, max_size=6))
@settings(max_examples=500, deadline=None)
def test_fuzz_values(events: list[Any]) -> None:
    survives(pack([1.0, events, 0]))


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_fuzz_damaged_messages(data: st.DataObject) -> None:
    payload = bytearray(framing.split_live(data.draw(st.sampled_from(recorded()))).payload[:2_000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                payload[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del payload[at : at + data.draw(st.integers(1, 9))]
            case _:
                payload[at:at] = data.draw(st.binary(max_size=9))
        if not payload:
            break
    survives(bytes(payload))


@given(st.lists(st.binary(max_size=12), max_size=5))
@settings(max_examples=300, deadline=None)
def test_fuzz_frames(frames: list[bytes]) -> None:
    for split in (framing.split_live, framing.split_replayed):
        try:
            message = split(frames)
        except CodecError:
            continue
        assert message.seq is None or 0 <= message.seq < 2**63


@given(st.lists(near_events, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_an_unknown_event_beside_them_changes_nothing_for_the_others(events: list[Any]) -> None:
    """The one-go decoder and the event-by-event decoder agree."""
    try:
        alone = decode(*events)
    except CodecError:
        with pytest.raises(CodecError):
            decode(*events, {"type": "Future"})
        return
    beside = decode(*events, {"type": "Future"})
    assert repr(beside.events) == repr(alone.events)
    assert beside.unknown_events == alone.unknown_events + 1


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("positional", [False, True])
def test_blocks_are_bounded_over_all_events_of_a_batch(positional: bool) -> None:
    half = list(range(event_fields.MAX_BATCH_BLOCKS // 2))
    stored = ["BlockStored", half, None, [], 16] if positional else {**STORED_MAP, "block_hashes": half}
    removed = ["BlockRemoved", half] if positional else {"type": "BlockRemoved", "block_hashes": half}
    assert len(decode(stored, removed).events) == 2
    with pytest.raises(CodecError) as caught:
        decode(stored, removed, {"type": "BlockRemoved", "block_hashes": [1]})
    assert caught.value.reason == "size"


def test_extra_keys_are_bounded_over_all_blocks_of_a_batch() -> None:
    blocks = codec.MAX_BATCH_EXTRA_KEYS // extra_keys.MAX_EXTRA_KEYS
    full: list[Any] = [[0] * extra_keys.MAX_EXTRA_KEYS] * blocks
    assert len(decode({**STORED_MAP, "extra_keys": full}).events) == 1
    with pytest.raises(CodecError) as caught:
        decode({**STORED_MAP, "extra_keys": full}, {**STORED_MAP, "extra_keys": [None, [1]]})
    assert caught.value.reason == "size"


def test_a_message_full_of_extra_keys_is_refused_before_they_are_built() -> None:
    """One object a key, for a message of 7 MiB, held up the loop for seconds."""
    event = {**STORED_MAP, "block_hashes": [1], "extra_keys": [[0] * 200] * 35_000}
    payload = pack([1.0, [event], 0])
    tracemalloc.start()
    for decoder in (codec.decode_batch, packed_decode or codec.decode_batch):
        with pytest.raises(CodecError) as caught:
            decoder(payload)
        assert caught.value.reason == "size"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * len(payload)


@pytest.mark.parametrize("key", [[[]] * 400_000, [0] * 400_000, [[[]] * 400_000], [{}] * 400_000])
@pytest.mark.parametrize("wrapped", [list, lambda key: {"a": key}])
def test_what_lies_inside_an_extra_key_is_bounded_too(key: list[Any], wrapped: Callable[[Any], Any]) -> None:
    """One key, a list of millions, took 600 MB and held up the loop for 6 s."""
    payload = pack([1.0, [{**STORED_MAP, "block_hashes": [1], "extra_keys": [[wrapped(key)]]}], 0])
    tracemalloc.start()
    for decoder in (codec.decode_batch, packed_decode or codec.decode_batch):
        with contextlib.suppress(CodecError):
            (stored,) = decoder(payload).events
            assert isinstance(stored, BlockStored)
            assert str(stored.extra_keys)[:20] == "((None,),)"  # a type that no chain goes past
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5 * len(payload)


def test_items_of_extra_keys_count_as_keys_over_a_batch() -> None:
    block = [["picture", 0, 1] * 10] * 8
    event = {**STORED_MAP, "extra_keys": [block] * (codec.MAX_BATCH_EXTRA_KEYS // 2 // (8 * 31))}
    assert len(decode(event, event).events) == 2
    with pytest.raises(CodecError) as caught:
        decode(event, event, {**STORED_MAP, "extra_keys": [block] * 5})
    assert caught.value.reason == "size"


@pytest.mark.parametrize("entries", [[None] * 40_000, [[]] * 40_000])
def test_entries_of_extra_keys_are_bounded_as_blocks_are(entries: list[Any]) -> None:
    event = {**STORED_MAP, "extra_keys": entries}
    assert len(decode(event, event, event).events) == 3
    with pytest.raises(CodecError) as caught:
        decode(event, event, event, event)
    assert caught.value.reason == "size"


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockRemoved", "block_hashes": [2**63 + i for i in range(50_000)]},
        {**STORED_MAP, "token_ids": [7] * 500_000},
        {**STORED_MAP, "extra_keys": [[f"p{i}", ["picture", 2**40 + i]] for i in range(20_000)]},
        {**STORED_MAP, "extra_keys": [["x" * 500_000]]},
    ],
)
def test_the_size_of_a_batch_is_what_it_takes_in_memory(event: dict[str, Any]) -> None:
    payload = pack([1.0, [event], 0])
    for decoder in (codec.decode_batch, packed_decode or codec.decode_batch):
        tracemalloc.start()
        batch = decoder(payload)
        taken_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.8 * taken_bytes < batch.size_bytes < 1.5 * taken_bytes + 1_000
