"""Claims of endpoints: none before their state is known, none after it may be wrong."""

from __future__ import annotations

from typing import Protocol

import pytest

from engine_plugin.identity import EndpointId
from epp.core.cache_view import MAX_PULL_MISSES, CacheView
from epp.core.events import (
    AllBlocksCleared,
    Applied,
    BlockRemoved,
    BlockStored,
    Buffered,
    Event,
    EventBatch,
    ReplayNeeded,
)
from epp.core.index_choice import IndexMaker
from epp.core.stream_step import StreamLimits
from epp.core.types import NO_MATCH, CacheTier, ClaimState, EngineBlockHash, PrefixMatch, SchedulingRequest

A, B = EndpointId("a"), EndpointId("b")
PROMPT = list(range(16))


def stored(*blocks: int) -> BlockStored:
    first = blocks[0]
    return BlockStored(
        CacheTier.DEVICE,
        tuple(EngineBlockHash(b + 1) for b in blocks),
        EngineBlockHash(first) if first else None,
        PROMPT[first * 4 : (blocks[-1] + 1) * 4],
        4,
    )


def removed(block: int) -> BlockRemoved:
    return BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(block + 1),))


def batch(seq: int, *events: Event, unknown: int = 0) -> EventBatch:
    return EventBatch(events, unknown, digest=1_000 + seq)


class NewView(Protocol):
    def __call__(self, *endpoints: EndpointId, has_replay: bool = True) -> CacheView: ...


@pytest.fixture
def new_view(make_index: IndexMaker) -> NewView:
    """Make a view with some endpoints over the index under test."""

    def make(*endpoints: EndpointId, has_replay: bool = True) -> CacheView:
        view = CacheView(make_index(b"v" * 16), StreamLimits(failed_replays=2))
        for endpoint in endpoints:
            view.add_endpoint(endpoint, has_replay)
        return view

    return make


def match(view: CacheView, endpoint: EndpointId = A, tokens: list[int] | None = PROMPT) -> PrefixMatch:
    return view.match(SchedulingRequest("r", token_ids=tokens), [endpoint])[endpoint]


def synced(new_view: NewView, has_replay: bool = True) -> CacheView:
    view = new_view(A, has_replay=has_replay)
    view.on_connect(A, 1.0)
    view.on_batch(A, 0, batch(0, stored(0, 1, 2, 3)), 1.0, replayed=has_replay)
    view.on_replay_end(A, True, 1.0)
    return view


def test_a_restarted_index_claims_nothing_until_the_replay_has_come(new_view: NewView) -> None:
    view = new_view(A)
    assert match(view) == PrefixMatch(state=ClaimState.UNKNOWN)
    assert view.on_connect(A, 1.0) == ReplayNeeded(0, False, "first_contact")
    assert view.on_batch(A, 0, batch(0, stored(0, 1, 2, 3)), 1.0, replayed=True) == Applied(stored_blocks=4)
    assert match(view).cached_tokens == 0
    assert match(view).state is ClaimState.SYNCING
    view.on_replay_end(A, True, 2.0)
    assert match(view) == PrefixMatch(ClaimState.LIVE, 4, 4, 0, 4, known_empty_start=True)
    assert match(view).cached_tokens == 16


def test_an_endpoint_that_is_known_empty_says_so(new_view: NewView) -> None:
    view = new_view(A)
    view.on_connect(A, 1.0)
    view.on_replay_end(A, True, 1.0)
    assert match(view) == PrefixMatch(ClaimState.LIVE, known_empty_start=True)


def test_a_removed_block_never_comes_back_through_a_late_replay(new_view: NewView) -> None:
    """S-C04 in the core: the gap held Stored(3), live is Removed(3), the replay answers late."""
    view = new_view(A)
    view.on_connect(A, 1.0)
    view.on_batch(A, 0, batch(0, stored(0, 1, 2)), 1.0, replayed=True)
    view.on_replay_end(A, True, 1.0)
    assert view.on_batch(A, 2, batch(2, removed(3)), 2.0) == ReplayNeeded(0, False, "gap")
    assert view.on_batch(A, 3, batch(3), 2.5) == Buffered(2)
    assert match(view).cached_tokens == 0
    view.on_batch(A, 0, batch(0, stored(0, 1, 2)), 3.0, replayed=True)
    view.on_batch(A, 1, batch(1, stored(3)), 3.0, replayed=True)
    assert view.on_replay_end(A, True, 3.0) == Applied(removed_blocks=1)
    assert (match(view).state, match(view).blocks) == (ClaimState.LIVE, 3)
    assert view.on_batch(A, 1, batch(1, stored(3)), 4.0, replayed=True) == Applied(duplicate=True)
    assert match(view).blocks == 3


def test_a_failed_replay_clears(new_view: NewView) -> None:
    view = synced(new_view)
    view.on_batch(A, 5, batch(5), 2.0)
    assert view.on_replay_end(A, False, 3.0) == ReplayNeeded(0, True, "replay_failed")
    assert view.stats(A).index.device_blocks == 0
    assert match(view).cached_tokens == 0
    view.on_replay_end(A, False, 4.0)  # gives up on replays; what it heard since is a start
    assert view.state(A) is ClaimState.UNKNOWN
    view.on_batch(A, 6, batch(6, stored(0, 1)), 5.0)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 2, 2, 0, 4)


def test_without_replay_a_store_that_cannot_be_resolved_makes_no_claim(new_view: NewView) -> None:
    view = new_view(A, has_replay=False)
    view.on_connect(A, 1.0)
    view.on_batch(A, 7, batch(7, stored(2, 3)), 1.0)
    assert match(view).state is ClaimState.UNKNOWN
    view.on_batch(A, 8, batch(8, stored(0, 1)), 1.0)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 4, 4, 0, 4)


def test_all_cleared_empties_that_endpoint_only(new_view: NewView) -> None:
    """S-C05."""
    view = new_view(A, B, has_replay=False)
    for endpoint in (A, B):
        view.on_batch(endpoint, 0, batch(0, stored(0, 1, 2, 3)), 1.0)
    view.on_batch(A, 1, batch(1, AllBlocksCleared()), 1.0)
    assert (match(view, A).blocks, match(view, B).blocks) == (0, 4)


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_restarted_engine_is_forgotten(new_view: NewView, has_replay: bool) -> None:
    view = synced(new_view, has_replay)
    assert match(view).blocks == 4
    other = EventBatch((stored(0),), 0, digest=5)
    answer = view.on_batch(A, 0, other, 2.0)
    assert match(view).blocks == (0 if has_replay else 1)
    assert isinstance(answer, ReplayNeeded) == has_replay
    if has_replay:
        view.on_batch(A, 0, other, 2.0, replayed=True)
        view.on_replay_end(A, True, 2.0)
        assert match(view).blocks == 1
        assert view.stats(A).counters.restarts == 1


def test_a_request_without_exact_tokens_matches_nothing_but_states_are_told(new_view: NewView) -> None:
    view = synced(new_view)
    assert match(view, tokens=None) == PrefixMatch(ClaimState.LIVE, 0, 0, 0, 4, True)
    assert match(view, tokens=[-1, 2, 3, 4]).blocks == 0
    assert match(view, tokens=[]).blocks == 0


def test_endpoints_that_left_are_harmless(new_view: NewView) -> None:
    view = synced(new_view)
    view.remove_endpoint(A)
    view.remove_endpoint(A)
    assert view.on_batch(A, 1, batch(1, stored(0)), 2.0) == Applied()
    assert (
        view.on_connect(A, 2.0) == view.on_disconnect(A, 2.0) == view.on_replay_end(A, True, 2.0) == Applied()
    )
    assert match(view) == NO_MATCH
    assert view.state(A) is ClaimState.UNKNOWN
    with pytest.raises(KeyError):
        view.stats(A)
    view.add_endpoint(A, has_replay=False)
    view.on_batch(A, 9, batch(9, stored(1)), 2.0)
    assert match(view).blocks == 0


def test_counters_tell_what_happened(new_view: NewView) -> None:
    view = synced(new_view)
    view.on_batch(A, 1, batch(1, stored(0), removed(3), unknown=2), 2.0)
    view.on_batch(A, 1, batch(1, stored(0), removed(3), unknown=2), 2.0)
    view.on_batch(A, 2, None, 3.0)
    stats = view.stats(A)
    counters = stats.counters
    assert (counters.live_batches, counters.replayed_batches) == (3, 1)
    assert (counters.applied_batches, counters.duplicate_batches) == (2, 1)
    assert (counters.stored_blocks, counters.removed_blocks, counters.unknown_events) == (5, 1, 4)
    assert (counters.undecodable_batches, counters.replays, counters.gaps) == (1, 2, 0)
    assert (stats.last_event_s, stats.state) == (3.0, ClaimState.SYNCING)


def test_an_endpoint_with_traffic_but_nothing_applied_is_visible(new_view: NewView) -> None:
    """S-C02, the silent half of it."""
    view = new_view(A, has_replay=False)
    assert not view.stats(A).deaf
    view.on_batch(A, 0, batch(0, unknown=3), 1.0)
    assert view.stats(A).deaf
    view.on_batch(A, 1, batch(1, stored(0)), 1.0)
    assert not view.stats(A).deaf


def test_distrusted_claims_are_dropped_and_what_comes_is_a_lower_bound(new_view: NewView) -> None:
    """S-C06: the engine sleeps or was reset; no event tells, because none leaves before its next step."""
    view = synced(new_view)
    view.distrust(A)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL)
    view.on_batch(A, 1, batch(1, removed(0), stored(0, 1)), 2.0)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 2, 2, 0, 4)
    view.on_batch(A, 2, batch(2, AllBlocksCleared(), stored(0)), 3.0)  # its late word changes nothing
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 1, 1, 0, 4)
    counters = view.stats(A).counters
    assert (counters.distrusted, counters.replays) == (1, 1)
    view.distrust(B)


def test_distrust_while_syncing_does_not_become_a_claim_to_be_empty(new_view: NewView) -> None:
    view = synced(new_view)
    view.on_disconnect(A, 2.0)
    view.distrust(A)
    view.on_connect(A, 3.0)
    view.on_batch(A, 0, batch(0, stored(0, 1, 2, 3)), 3.0, replayed=True)
    view.on_replay_end(A, True, 3.0)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL)


def test_repeated_pull_misses_end_the_trust_in_a_source(new_view: NewView) -> None:
    """S-C06: pulls find nothing, again and again; single misses are evictions on the way."""
    view = synced(new_view)
    for missed in (True, True, False, True, True):
        view.note_pull(A, missed=missed)
    assert match(view).blocks == 4
    view.note_pull(A, missed=True)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL)
    view.on_batch(A, 1, batch(1, stored(0)), 2.0)
    for _ in range(MAX_PULL_MISSES - 1):
        view.note_pull(A, missed=True)
    assert match(view).blocks == 1  # counted anew
    view.note_pull(B, missed=True)


def test_age_alone_takes_no_claim(new_view: NewView) -> None:
    """S-C06: an idle engine sends no events and keeps its blocks; the age is shown, not acted upon."""
    view = synced(new_view)
    assert view.stats(A).last_event_s == 1.0
    assert match(view).blocks == 4
