"""Texts and their events: parts share what is equal, and batches say what the live decoder would say."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from epp.core.packed_events import PackedBatch
from epp.core.types import CacheTier
from simulator.event_log import EventLog
from simulator.prompts import Content

SIZE = 4


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=5), st.integers(0, 150))
def test_a_text_in_parts_is_named_as_the_whole(parts: list[list[int]], cut: int) -> None:
    whole = array("I", [token for part in parts for token in part])
    grown = Content.of(array("I", parts[0]), SIZE)
    for part in parts[1:]:
        grown = grown.followed_by(array("I", part))
    once = Content.of(whole, SIZE)
    assert grown.names == once.names
    assert grown.tokens.tolist() == whole.tolist()
    head = once.first(cut)
    assert head.names == Content.of(whole[:cut], SIZE).names
    assert len(head.names) == min(cut, len(whole)) // SIZE


def test_a_batch_says_what_was_stored_removed_and_cleared() -> None:
    sent: list[PackedBatch] = []
    log = EventLog(SIZE, sent.append)
    content = Content.of(array("I", range(20)), SIZE)
    log.stored(CacheTier.CPU, content, 1, bytes([1, 0, 1, 1]))
    log.removed(CacheTier.DEVICE, content.names[:2])
    log.removed(CacheTier.CPU, array("Q"))  # nothing
    log.all_cleared()
    log.flush()
    log.flush()  # nothing is left
    (batch,) = sent
    names = content.names.tolist()
    first, second, removed, cleared = batch.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.tier, list(first.hashes), first.parent) == (CacheTier.CPU, names[1:2], names[0])
    assert (list(second.hashes), second.parent) == (names[3:5], names[2])
    assert second.token_ids is not None
    assert list(second.token_ids) == list(range(12, 20))
    assert second.extra_keys == (None, None)
    assert removed == BlockRemoved(CacheTier.DEVICE, tuple(names[:2]), None)
    assert isinstance(cleared, AllBlocksCleared)


def test_the_first_block_has_no_parent_and_what_was_not_sent_can_be_lost() -> None:
    sent: list[PackedBatch] = []
    log = EventLog(SIZE, sent.append)
    content = Content.of(array("I", range(8)), SIZE)
    log.stored(CacheTier.DEVICE, content, 0, b"\1\1")
    log.clear()
    log.flush()
    assert not sent
    log.stored(CacheTier.DEVICE, content, 0, b"\1\1")
    log.flush()
    (event,) = sent[0].events
    assert isinstance(event, BlockStored)
    assert (event.parent, event.tier, event.block_size_tokens) == (None, CacheTier.DEVICE, SIZE)
