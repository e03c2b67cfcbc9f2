"""An engine dies and an empty one takes its address: nothing of the dead one may be claimed.

The last frames of the dead process reach us at the worst moments: after its disconnect was seen, or
after a replay was already asked of its successor.
"""

from __future__ import annotations

import itertools

import pytest

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.events import Applied, BatchResult, BlockRemoved, BlockStored, EventBatch, ReplayNeeded
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import CacheTier, ClaimState, EngineBlockHash, PrefixMatch, SchedulingRequest

E = EndpointId("a")
SIZE = 16
BLOCKS = 8
OLD_BATCHES = 5
_digests = itertools.count(1)


def idle() -> EventBatch:
    return EventBatch((BlockRemoved(CacheTier.CPU, (EngineBlockHash(999),)),), 0, next(_digests))


def stores() -> EventBatch:
    hashes = tuple(EngineBlockHash(100 + i) for i in range(BLOCKS))
    extra_keys = (None,) * BLOCKS
    event = BlockStored(
        CacheTier.CPU, hashes, None, list(range(SIZE * BLOCKS)), SIZE, None, extra_keys, has_extra_keys=True
    )
    return EventBatch((event,), 0, next(_digests))


class Heir:
    """The new process: answers every replay from its own batches, and says nothing else."""

    def __init__(self, view: CacheView, batches: int) -> None:
        self.view = view
        self.batches = [idle() for _ in range(batches)]

    def answer(self, asked: BatchResult) -> None:
        for _ in range(20):
            if not isinstance(asked, ReplayNeeded):
                return
            asked = self._replay(asked.from_seq)
        raise AssertionError("replays without an end")

    def _replay(self, from_seq: int) -> BatchResult:
        for seq, batch in list(enumerate(self.batches))[from_seq:]:
            answer = self.view.on_batch(E, seq, batch, 0.0, replayed=True)
            if isinstance(answer, ReplayNeeded):
                return answer
        return self.view.on_replay_end(E, True, 0.0)


def view_of_the_old_process() -> CacheView:
    view = CacheView(PythonPrefixIndex(b"0" * 16))
    view.add_endpoint(E, has_replay=True)
    view.on_connect(E, 0.0)
    view.on_replay_end(E, True, 0.0)
    for seq in range(OLD_BATCHES):
        view.on_batch(E, seq, idle(), 0.0)
    assert view.state(E) is ClaimState.LIVE
    return view


def match(view: CacheView) -> PrefixMatch:
    return view.match(SchedulingRequest("r", token_ids=list(range(SIZE * BLOCKS))), [E])[E]


new_engines = pytest.mark.parametrize("batches", [0, 2, OLD_BATCHES])


@new_engines
def test_a_late_frame_after_the_disconnect_is_ignored(batches: int) -> None:
    view = view_of_the_old_process()
    view.on_disconnect(E, 0.0)
    assert view.on_batch(E, OLD_BATCHES, stores(), 0.0) == Applied()
    Heir(view, batches).answer(view.on_connect(E, 0.0))
    assert match(view).servable_tokens == 0
    assert view.state(E) is ClaimState.LIVE  # it was the heir that was heard, to the end
    assert view.stats(E).held_batches == 0


@new_engines
def test_a_late_frame_during_the_replay_of_the_heir_is_dropped_with_the_restart(batches: int) -> None:
    view = view_of_the_old_process()
    view.on_disconnect(E, 0.0)
    asked = view.on_connect(E, 0.0)
    view.on_batch(E, OLD_BATCHES, stores(), 0.0)
    assert view.stats(E).held_batches == 1
    Heir(view, batches).answer(asked)
    assert match(view).servable_tokens == 0
    assert view.state(E) is ClaimState.LIVE
    assert view.stats(E).index.cpu_blocks == 0


@new_engines
def test_a_gap_that_the_heir_is_asked_to_fill_brings_nothing_back(batches: int) -> None:
    """The replay socket reached the new process before the old one's disconnect was seen."""
    view = view_of_the_old_process()
    asked = view.on_batch(E, OLD_BATCHES + 2, stores(), 0.0)
    Heir(view, batches).answer(asked)
    assert match(view).servable_tokens == 0


@pytest.mark.parametrize("batches", [0, 2])
def test_nothing_is_applied_beyond_a_hole_that_the_engine_denies(batches: int) -> None:
    """No position yet, so no digest tells the processes apart; the hole does."""
    view = CacheView(PythonPrefixIndex(b"0" * 16))
    view.add_endpoint(E, has_replay=True)
    asked = view.on_connect(E, 0.0)
    view.on_batch(E, OLD_BATCHES, stores(), 0.0)
    Heir(view, batches).answer(asked)
    assert not view.state(E).has_claim
    assert match(view).servable_tokens == 0
    assert view.stats(E).index.cpu_blocks == 0
    view.on_batch(E, batches, stores(), 0.0)  # what the engine says from now on counts
    assert match(view).servable_tokens == SIZE * BLOCKS


def test_a_denied_hole_is_not_forgotten_when_the_last_replay_fails() -> None:
    view = CacheView(PythonPrefixIndex(b"0" * 16))
    view.add_endpoint(E, has_replay=True)
    view.on_connect(E, 0.0)
    view.on_batch(E, OLD_BATCHES, stores(), 0.0)
    for ok in (True, True, False):
        view.on_replay_end(E, ok, 0.0)
    assert not view.state(E).has_claim
    assert view.stats(E).index.cpu_blocks == 0


@pytest.mark.parametrize("seq", [0, OLD_BATCHES])
def test_without_replay_a_late_frame_makes_no_claim_either(seq: int) -> None:
    view = CacheView(PythonPrefixIndex(b"0" * 16))
    view.add_endpoint(E, has_replay=False)
    view.on_connect(E, 0.0)
    view.on_disconnect(E, 0.0)
    view.on_batch(E, seq, stores(), 0.0)
    assert match(view).servable_tokens == 0
    view.on_connect(E, 0.0)
    assert match(view).servable_tokens == 0
    view.on_batch(E, 0, stores(), 0.0)
    assert match(view).servable_tokens == SIZE * BLOCKS
