"""Speculative entries of the cache view: what is expected, from when, and what ends it."""

from __future__ import annotations

from typing import Protocol

import pytest

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from epp.core.index_choice import IndexMaker
from epp.core.speculation import SpeculationSettings
from epp.core.types import CacheTier, ClaimState, EngineBlockHash, PrefixMatch, SchedulingRequest
from epp.core.view_state import LookUp

A, B = EndpointId("a"), EndpointId("b")
SIZE, TTL_S = 4, 2.0
PROMPT = list(range(40))
OTHER = [900, 901, 902, 903]  # one block: engines show their block size with it


def stored(tokens: list[int], blocks: int, first: int = 0) -> BlockStored:
    """Blocks `first` to `blocks` of a prompt."""
    names = [EngineBlockHash(tokens[0] * 1_000 + i + 1) for i in range(blocks)]
    return BlockStored(
        CacheTier.DEVICE,
        tuple(names[first:]),
        names[first - 1] if first else None,
        tokens[first * SIZE : blocks * SIZE],
        SIZE,
    )


class View:
    """A view whose endpoints are live, with one block of another prompt each."""

    def __init__(self, view: CacheView) -> None:
        self.view = view
        self.seq = 0
        self.count = 0

    def add(self, endpoint: EndpointId, has_replay: bool = True) -> None:
        self.view.add_endpoint(endpoint, has_replay)
        self.view.on_connect(endpoint, 0.0)
        if has_replay:
            self.view.on_replay_end(endpoint, True, 0.0)
        self.view.on_batch(endpoint, 0, EventBatch((stored(OTHER, 1),), digest=1), 0.0)

    def tell(self, *events: Event, endpoint: EndpointId = A) -> None:
        self.seq += 1
        self.view.on_batch(endpoint, self.seq, EventBatch(events, digest=self.seq + 1), 0.0)

    def look_up(
        self, now_s: float = 0.0, tokens: list[int] | None = PROMPT, salt: str | None = None
    ) -> LookUp:
        request = SchedulingRequest("r", token_ids=tokens, cache_salt=salt)
        return self.view.look_up(request, [A, B], now_s)

    def place(
        self,
        *endpoints: EndpointId,
        now_s: float = 0.0,
        tokens: list[int] | None = PROMPT,
        salt: str | None = None,
    ) -> str:
        self.count += 1
        decision_id = f"d{self.count}"
        self.view.place(decision_id, self.look_up(now_s, tokens, salt), endpoints or (A,), now_s)
        return decision_id

    def speculative(
        self,
        endpoint: EndpointId = A,
        now_s: float = 0.0,
        tokens: list[int] | None = PROMPT,
        salt: str | None = None,
    ) -> int:
        return self.look_up(now_s, tokens, salt).matches[endpoint].speculative_blocks


class NewView(Protocol):
    def __call__(self, *, has_replay: bool = True, ttl_s: float = TTL_S) -> View: ...


@pytest.fixture
def new_view(make_index: IndexMaker) -> NewView:
    def make(*, has_replay: bool = True, ttl_s: float = TTL_S) -> View:
        view = View(CacheView(make_index(b"v" * 16), speculation=SpeculationSettings(ttl_s)))
        view.add(A, has_replay)
        view.add(B, has_replay)
        return view

    return make


def test_a_placed_prompt_is_expected_there_and_only_there(new_view: NewView) -> None:
    view = new_view()
    view.place(A)
    found = view.look_up()
    assert found.matches[A] == PrefixMatch(ClaimState.LIVE, 0, 0, 0, SIZE, True, speculative_blocks=10)
    assert (found.matches[A].cached_tokens, found.matches[A].servable_tokens) == (0, 0)
    assert (found.matches[A].expected_blocks, found.matches[A].expected_tokens) == (10, 40)
    assert found.matches[B] == PrefixMatch(ClaimState.LIVE, 0, 0, 0, SIZE, True)


def test_the_confirmed_look_up_never_contains_it(new_view: NewView) -> None:
    view = new_view()
    view.place(A)
    match = view.view.match(SchedulingRequest("r", token_ids=PROMPT), [A])[A]
    assert match == PrefixMatch(ClaimState.LIVE, 0, 0, 0, SIZE, True)


def test_switched_off_nothing_is_expected(make_index: IndexMaker) -> None:
    view = View(CacheView(make_index(b"v" * 16)))
    view.add(A)
    view.add(B)
    view.place(A)
    assert view.look_up().keys == {}
    assert view.speculative() == 0
    assert view.view.stats(A).speculative_entries == 0


def test_it_ends_with_its_time_to_live(new_view: NewView) -> None:
    view = new_view()
    view.place(A, now_s=10.0)
    assert view.speculative(now_s=11.999) == 10
    assert view.speculative(now_s=12.0) == 0
    assert view.view.stats(A).speculative_entries == 0


def test_prompts_that_share_only_block_0(new_view: NewView) -> None:
    view = new_view()
    view.place(A)
    assert view.speculative(tokens=[*PROMPT[:4], *range(500, 540)]) == 1
    assert view.speculative(tokens=[*PROMPT[:3], *range(500, 540)]) == 0


def test_salted_prompts_are_prompts_of_their_own(new_view: NewView) -> None:
    view = new_view()
    view.place(A, salt="s")
    assert (view.speculative(salt="s"), view.speculative(salt="t"), view.speculative()) == (10, 0, 0)


@pytest.mark.parametrize("tokens", [None, [1, 2, 3], [-1, 2, 3, 4]])
def test_no_exact_whole_block_is_no_entry(new_view: NewView, tokens: list[int] | None) -> None:
    view = new_view()
    view.place(A, tokens=tokens)
    assert view.speculative(tokens=tokens) == 0
    assert view.view.stats(A).speculative_entries == 0


# --- confirmation -----------------------------------------------------------------------------------


def test_partly_confirmed_the_deeper_of_both_counts(new_view: NewView) -> None:
    view = new_view()
    view.place(A)
    view.tell(stored(PROMPT, 6))
    match = view.look_up().matches[A]
    assert (match.blocks, match.speculative_blocks, match.expected_blocks) == (6, 10, 10)


def test_confirmed_blocks_take_its_place(new_view: NewView) -> None:
    """What the engine then says of them counts, also within the time to live."""
    view = new_view()
    view.place(A)
    view.tell(stored(PROMPT, 10))
    match = view.look_up().matches[A]
    assert (match.blocks, match.speculative_blocks) == (10, 0)
    assert view.view.stats(A).speculative_entries == 0
    view.tell(BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(4),)))
    match = view.look_up().matches[A]
    assert (match.blocks, match.speculative_blocks, match.expected_blocks) == (3, 0, 3)


def test_a_prompt_that_is_there_is_not_expected(new_view: NewView) -> None:
    view = new_view()
    view.tell(stored(PROMPT, 10))
    view.place(A)
    assert view.view.stats(A).speculative_entries == 0
    view.tell(BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(10),)))
    assert view.look_up().matches[A].expected_blocks == 9
    view.place(A)
    assert view.look_up().matches[A].expected_blocks == 10


def test_a_hole_in_the_confirmed_blocks_leaves_a_lower_bound(new_view: NewView) -> None:
    """Speculative 0-4 and confirmed 5-9 together are 10 deep; 5 is claimed."""
    view = new_view()
    view.tell(stored(PROMPT, 10), BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(2),)))
    view.place(A, tokens=PROMPT[:20])
    match = view.look_up().matches[A]
    assert (match.blocks, match.speculative_blocks, match.expected_blocks) == (1, 5, 5)


# --- what ends it early -----------------------------------------------------------------------------


def test_a_request_that_ends_without_a_first_token_brought_nothing(new_view: NewView) -> None:
    view = new_view()
    decision_id = view.place(A, B)
    view.view.on_release(decision_id)
    view.view.on_release(decision_id)
    assert (view.speculative(A), view.speculative(B)) == (0, 0)
    assert view.view.stats(A).speculative_entries == 0


def test_after_the_first_token_the_end_means_nothing(new_view: NewView) -> None:
    view = new_view()
    decision_id = view.place(A)
    view.view.on_first_token(decision_id)
    view.view.on_release(decision_id)
    assert view.speculative() == 10


def test_a_failed_request_takes_only_its_own_entry_along(new_view: NewView) -> None:
    view = new_view()
    view.place(A, now_s=0.0, tokens=PROMPT[:20])
    longer = view.place(A, now_s=0.0, tokens=[*PROMPT[:16], *range(500, 516)])
    view.view.on_release(longer)
    assert view.speculative(now_s=0.0) == 5
    failed = view.place(A, tokens=PROMPT[:20])
    view.place(A, tokens=PROMPT[:20])  # in the same instant
    view.view.on_release(failed)
    assert view.speculative(now_s=0.3) == 5


def test_all_blocks_cleared_clears_it(new_view: NewView) -> None:
    view = new_view()
    view.place(A, B)
    view.tell(AllBlocksCleared())
    view.tell(stored(OTHER, 1))
    assert view.look_up().matches[A].block_size_tokens == SIZE
    assert (view.speculative(A), view.speculative(B)) == (0, 10)


def test_blocks_stored_after_the_clear_are_new_ones(new_view: NewView) -> None:
    view = new_view()
    view.place(A)
    view.tell(AllBlocksCleared(), stored(OTHER, 1))
    view.place(A)
    assert view.speculative() == 10


def test_a_restarted_engine_is_expected_to_have_nothing(new_view: NewView) -> None:
    view = new_view()
    decision_id = view.place(A)
    view.view.on_batch(A, 0, EventBatch((stored(OTHER, 1),), digest=99), 0.0)  # the sequence went back
    assert view.view.state(A) is ClaimState.SYNCING
    view.view.on_replay_end(A, True, 0.0)
    assert view.look_up().matches[A].block_size_tokens == SIZE
    assert view.speculative() == 0
    view.view.on_release(decision_id)


def test_a_lost_stream_without_replay_forgets(new_view: NewView) -> None:
    view = new_view(has_replay=False)
    view.place(A)
    assert view.speculative() == 10
    view.view.on_disconnect(A, 0.0)
    view.view.on_connect(A, 0.0)
    view.view.on_batch(A, 0, EventBatch((stored(OTHER, 1),), digest=1), 0.0)
    assert view.view.state(A).has_claim
    assert view.speculative() == 0


def test_an_endpoint_that_left_and_came_back_has_nothing_coming(new_view: NewView) -> None:
    view = new_view()
    decision_id = view.place(A)
    view.view.remove_endpoint(A)
    view.add(A)
    assert view.speculative() == 0
    view.place(A)
    view.add(A)
    assert view.speculative() == 0
    view.view.on_release(decision_id)  # of the endpoint that is gone
    view.place(A)
    assert view.speculative() == 10


# --- unknown stays unknown --------------------------------------------------------------------------


def test_an_unknown_endpoint_does_not_become_known(new_view: NewView) -> None:
    view = new_view()
    view.view.add_endpoint(B, True)
    view.place(A, B)
    match = view.look_up().matches[B]
    assert match == PrefixMatch(ClaimState.UNKNOWN)
    assert view.view.stats(B).speculative_entries == 0
    view.view.on_connect(B, 0.0)
    view.view.on_replay_end(B, True, 0.0)
    assert view.speculative(B) == 0


def test_what_is_sent_while_the_stream_is_repaired_is_not_expected(new_view: NewView) -> None:
    """Nothing could tell whether that engine is still the same one."""
    view = new_view()
    view.view.on_disconnect(B, 0.0)
    view.place(A, B)
    view.view.on_connect(B, 0.0)
    view.view.on_batch(B, 0, EventBatch((stored(OTHER, 1),), digest=1), 0.0, replayed=True)
    view.view.on_replay_end(B, True, 0.0)
    assert view.look_up().matches[B] == PrefixMatch(ClaimState.LIVE, 0, 0, 0, SIZE, True)


def test_while_the_stream_is_repaired_nothing_is_said(new_view: NewView) -> None:
    """And then it holds again: the same engine process is still working on it."""
    view = new_view()
    view.place(A)
    view.view.on_disconnect(A, 0.0)
    match = view.look_up().matches[A]
    assert (match.state, match.speculative_blocks, match.expected_tokens) == (ClaimState.SYNCING, 0, 0)
    view.view.on_connect(A, 0.0)
    view.view.on_batch(A, 0, EventBatch((stored(OTHER, 1),), digest=1), 0.0, replayed=True)
    view.view.on_replay_end(A, True, 0.0)
    assert view.view.state(A) is ClaimState.LIVE
    assert view.speculative() == 10


def test_an_engine_that_has_shown_no_block_size_has_no_entry(new_view: NewView) -> None:
    view = new_view()
    view.view.add_endpoint(B, True)
    view.view.on_connect(B, 0.0)
    view.view.on_replay_end(B, True, 0.0)
    view.place(B)
    assert view.look_up().matches[B] == PrefixMatch(ClaimState.LIVE, known_empty_start=True)
    assert view.view.stats(B).speculative_entries == 0


# --- leaving nothing behind -------------------------------------------------------------------------


def test_churn_leaves_nothing_behind(new_view: NewView) -> None:
    """S-C07: every table of the entries."""
    view = new_view()
    view.view.remove_endpoint(A)
    entries = view.view._speculative
    assert entries is not None
    for n in range(300):
        view.add(A)
        started = [view.place(A, now_s=float(n), tokens=[n, *PROMPT[: 8 * k + 7]]) for k in range(4)]
        view.view.on_first_token(view.place(A, now_s=float(n), tokens=[n + 1_000, *PROMPT]))
        if n % 2:
            view.view.remove_endpoint(A)
        for decision_id in started:
            view.view.on_release(decision_id)
        view.view.remove_endpoint(A)
        assert (entries.pending, entries.bytes, entries.entries(A)) == (0, 0, 0)
    entries.check_integrity()


def test_overdue_entries_are_swept_by_traffic(new_view: NewView) -> None:
    view = new_view()
    entries = view.view._speculative
    assert entries is not None
    for n in range(500):
        view.view.on_first_token(view.place(A, B, now_s=n * 0.01, tokens=[n, *PROMPT]))
    assert entries.entries(A) <= TTL_S / 0.01 + 1
    for _ in range(20):
        view.look_up(now_s=100.0)
    assert (entries.entries(A), entries.entries(B), entries.bytes) == (0, 0, 0)
