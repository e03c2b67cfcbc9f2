"""The stream's states, and a random walk that compares what was applied with what was published."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from epp.core.event_stream import EventStream
from epp.core.events import Batch, BlockRemoved, BlockStored, EventBatch, ReplayNeeded
from epp.core.packed_events import PackedBatch
from epp.core.stream_position import StreamPosition
from epp.core.stream_step import Step, StreamLimits
from epp.core.types import CacheTier, ClaimState, EngineBlockHash


def batch(seq: int, process: int = 0) -> EventBatch:
    """The batch that engine process number `process` published under `seq`."""
    return EventBatch(
        (BlockRemoved(CacheTier.DEVICE, (EngineBlockHash(seq),)),), 0, process * 10**6 + seq + 1
    )


def seqs(step: Step) -> list[int]:
    return [b.digest % 10**6 - 1 for b in step.apply]


def replay(stream: EventStream, which: Iterable[int], process: int = 0) -> Step:
    for seq in which:
        stream.on_replayed(seq, batch(seq, process))
    return stream.on_replay_end(True)


def live_stream(upto: int = 3, limits: StreamLimits | None = None) -> EventStream:
    stream = EventStream(True, limits)
    stream.on_connect()
    replay(stream, range(upto))
    assert stream.state is ClaimState.LIVE
    return stream


def test_first_contact_asks_for_everything_and_claims_only_at_the_end() -> None:
    stream = EventStream(True)
    assert stream.state is ClaimState.UNKNOWN
    assert stream.on_connect().replay == ReplayNeeded(0, False, "first_contact")
    assert stream.state is ClaimState.SYNCING
    assert seqs(stream.on_replayed(0, batch(0))) == [0]
    assert stream.on_live(2, batch(2)).held
    assert not stream.state.has_claim
    assert seqs(stream.on_replayed(1, batch(1))) == [1]
    assert seqs(stream.on_replay_end(True)) == [2]
    assert (stream.state, stream.next_seq, stream.known_empty_start) == (ClaimState.LIVE, 3, True)


def test_an_engine_without_history_is_known_empty() -> None:
    stream = EventStream(True)
    stream.on_connect()
    stream.on_replay_end(True)
    assert (stream.state, stream.known_empty_start) == (ClaimState.LIVE, True)
    assert seqs(stream.on_live(0, batch(0))) == [0]


def test_live_traffic_alone_also_starts_the_first_replay() -> None:
    stream = EventStream(True)
    step = stream.on_live(7, batch(7))
    assert step.replay == ReplayNeeded(0, False, "first_contact")
    assert seqs(replay(stream, range(7))) == [7]


def test_a_replay_that_was_cut_goes_on_from_where_it_got_to() -> None:
    stream = EventStream(True)
    stream.on_connect()
    for seq in range(3):
        stream.on_replayed(seq, batch(seq))
    step = stream.on_replay_cut()
    assert (step.clear, step.replay) == (False, ReplayNeeded(2, False, "cut"))
    assert not stream.state.has_claim
    assert seqs(replay(stream, range(2, 5))) == []
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 5)


def test_a_cut_that_brought_nothing_new_is_a_failed_replay() -> None:
    stream = live_stream()
    stream.on_live(7, batch(7))
    assert stream.on_replay_cut().clear  # what the hole hides may be removals
    assert not stream.state.has_claim


def test_a_wrapped_replay_buffer_is_a_lower_bound() -> None:
    stream = EventStream(True)
    stream.on_connect()
    step = stream.on_replayed(5, batch(5))
    assert seqs(step) == [5]
    stream.on_replay_end(True)
    assert (stream.state, stream.known_empty_start) == (ClaimState.PARTIAL, False)


def test_batches_in_order_are_applied_and_repeated_ones_ignored() -> None:
    stream = live_stream(3)
    assert seqs(stream.on_live(3, batch(3))) == [3]
    assert stream.on_live(1, batch(1)) == Step(duplicate=True)
    assert stream.on_live(3, batch(3)) == Step(duplicate=True)
    assert stream.state is ClaimState.LIVE


def test_a_gap_is_repaired_in_order() -> None:
    stream = live_stream(3)
    step = stream.on_live(5, batch(5))
    assert step.replay == ReplayNeeded(2, False, "gap")  # one early, to recognise the process
    assert stream.state is ClaimState.SYNCING
    assert stream.on_live(6, batch(6)).held
    assert stream.on_replayed(2, batch(2)).duplicate
    assert [seqs(stream.on_replayed(s, batch(s))) for s in (3, 4, 5)] == [[3], [4], [5]]
    assert seqs(stream.on_replay_end(True)) == [6]
    assert (stream.state, stream.known_empty_start) == (ClaimState.LIVE, True)


def test_a_failed_replay_drops_everything_and_starts_over() -> None:
    stream = live_stream(3)
    stream.on_live(5, batch(5))
    step = stream.on_replay_end(False)
    assert step == Step(clear=True, replay=ReplayNeeded(0, True, "replay_failed"))
    assert stream.state is ClaimState.SYNCING
    assert seqs(replay(stream, range(5))) == [5]
    assert stream.state is ClaimState.LIVE


def test_late_answers_of_a_failed_replay_change_nothing() -> None:
    stream = EventStream(True, StreamLimits(failed_replays=1))
    stream.on_connect()
    stream.on_replay_end(False)
    assert stream.on_replayed(0, batch(0)).duplicate
    assert stream.on_replay_end(True) == Step()
    assert stream.state is ClaimState.UNKNOWN


def test_after_repeated_failures_it_goes_on_without_replay() -> None:
    stream = EventStream(True, StreamLimits(failed_replays=3))
    stream.on_connect()
    for seq in (4, 5, 8, 9):
        stream.on_live(seq, batch(seq))
    assert stream.on_replay_end(False).replay
    assert stream.on_replay_end(False).replay
    last = stream.on_replay_end(False)
    assert last.clear
    assert last.replay is None
    assert seqs(last) == [8, 9]  # 6 and 7 may have removed what 4 and 5 stored
    assert stream.state is ClaimState.UNKNOWN
    stream.on_resolved_store()
    assert stream.state is ClaimState.PARTIAL
    assert stream.on_connect().replay is not None  # a new connection is a new chance


def test_an_unreadable_batch_is_a_gap_and_later_ones_are_applied() -> None:
    stream = live_stream(3)
    assert stream.on_live(3, None).replay == ReplayNeeded(2, False, "undecodable")
    assert stream.on_live(4, batch(4)).held
    assert seqs(replay(stream, [2, 3])) == [4]
    assert stream.state is ClaimState.LIVE


def test_a_batch_unreadable_even_in_the_replay_costs_what_was_held() -> None:
    stream = live_stream(3)
    stream.on_live(3, None)
    stream.on_live(4, batch(4))
    assert stream.on_replayed(2, batch(2)).duplicate
    assert stream.on_replayed(3, None) == Step(clear=True)
    assert seqs(stream.on_replay_end(True)) == [4]
    assert (stream.state, stream.known_empty_start) == (ClaimState.PARTIAL, False)


def test_a_sequence_that_goes_back_with_other_content_is_a_restart() -> None:
    stream = live_stream(9)
    step = stream.on_live(0, batch(0, process=1))
    assert step == Step(clear=True, replay=ReplayNeeded(0, True, "restart"))
    assert seqs(replay(stream, [], process=1)) == [0]
    assert (stream.state, stream.known_empty_start) == (ClaimState.LIVE, True)


def test_a_restart_that_has_passed_the_old_sequence_shows_in_the_digest() -> None:
    stream = live_stream(3)
    stream.on_live(9, batch(9, process=1))
    step = stream.on_replayed(2, batch(2, process=1))
    assert step == Step(clear=True, replay=ReplayNeeded(0, True, "restart"))
    assert stream.held_batches == 0  # batch 9 could be the old process's; if not, it is replayed
    assert replay(stream, range(10), process=1) == Step()
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 10)


def test_a_disconnect_takes_the_claim_until_the_same_process_is_heard() -> None:
    stream = live_stream(3)
    stream.on_disconnect()
    assert not stream.state.has_claim
    assert stream.on_connect().replay == ReplayNeeded(2, False, "reconnect")
    assert stream.on_replayed(2, batch(2)).duplicate
    stream.on_replay_end(True)
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 3)


def test_an_engine_that_restarted_while_we_were_away_is_cleared() -> None:
    stream = live_stream(3)
    stream.on_disconnect()
    stream.on_connect()
    assert stream.on_replay_end(True) == Step(clear=True, replay=ReplayNeeded(0, True, "restart"))
    stream.on_replay_end(True)
    assert stream.known_empty_start


def test_held_batches_that_contradict_the_replay_are_dropped_once() -> None:
    """A process that restarted unseen and has passed what the old one had sent last."""
    stream = EventStream(True)
    stream.on_connect()
    stream.on_live(1, batch(1, process=0))
    stream.on_live(5, batch(5, process=1))
    step = replay(stream, range(6), process=1)
    assert step == Step(clear=True, replay=ReplayNeeded(0, True, "restart"))
    assert replay(stream, range(6), process=1) == Step()
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 6)


def test_batches_lost_inside_a_replay_are_asked_for_again() -> None:
    stream = EventStream(True)
    stream.on_connect()
    stream.on_replayed(0, batch(0))
    assert stream.on_replayed(4, batch(4)).replay == ReplayNeeded(0, False, "gap")
    replay(stream, range(5))
    assert (stream.state, stream.next_seq, stream.known_empty_start) == (ClaimState.LIVE, 5, True)


def test_a_batch_that_is_gone_for_good_ends_in_partial_and_not_in_a_loop() -> None:
    stream = live_stream(3)
    asked = [stream.on_live(5, batch(5)).replay]
    for _ in range(20):
        if asked[-1] is None:
            break
        steps = [stream.on_replayed(s, batch(s)) for s in range(asked[-1].from_seq, 6) if s != 3]
        again = [s.replay for s in steps if s.replay is not None]
        asked.append(again[0] if again else stream.on_replay_end(True).replay)
    assert asked[-1] is None
    assert (stream.state, stream.next_seq) == (ClaimState.PARTIAL, 6)


def test_an_end_marker_short_of_what_was_heard_is_bounded_too() -> None:
    stream = live_stream(3)
    asked = stream.on_live(9, batch(9)).replay
    last = Step()
    rounds = 0
    while asked is not None and rounds < 20:
        for seq in range(asked.from_seq, 3):  # the engine never has more than 0..2
            stream.on_replayed(seq, batch(seq))
        last = stream.on_replay_end(True)
        asked = last.replay
        rounds += 1
    assert rounds <= 12
    assert last == Step(clear=True)  # batch 9 may be another process's
    assert (stream.state, stream.next_seq) == (ClaimState.UNKNOWN, None)
    assert seqs(stream.on_live(10, batch(10))) == [10]


def test_the_buffer_of_held_batches_is_bounded_and_its_loss_is_repaired() -> None:
    stream = EventStream(True, StreamLimits(held_batches=3))
    stream.on_connect()
    for seq in range(10):
        stream.on_live(seq, batch(seq))
    assert stream.held_batches == 3
    stream.on_replayed(0, batch(0))
    step = stream.on_replay_end(True)
    assert step.replay == ReplayNeeded(0, False, "gap")
    assert seqs(replay(stream, range(7))) == [7, 8, 9]
    assert stream.state is ClaimState.LIVE


@pytest.mark.parametrize("packed", [False, True])
def test_held_batches_are_bounded_by_their_bytes_and_the_newest_stays(packed: bool) -> None:
    """An engine could make us hold 4,096 batches of 32 MiB each."""

    def large(seq: int) -> Batch:
        if packed:
            return PackedBatch(b"", b"", bytes(4 * 10_000), (), (), 0, seq + 1)
        tokens = array("I", [0]) * 10_000
        return EventBatch((BlockStored(CacheTier.DEVICE, (), None, tokens, 16),), 0, seq + 1)

    stream = EventStream(True, StreamLimits(held_bytes=100_000))
    stream.on_connect()
    for seq in range(10):
        stream.on_live(seq, large(seq))
    assert (stream.held_batches, stream.held_bytes) == (2, 2 * large(0).size_bytes)
    for seq in range(10, 13):  # larger than all that may be held
        stream.on_live(seq, EventBatch((BlockStored(CacheTier.DEVICE, (), None, range(50_000), 16),)))
    assert stream.held_batches == 1
    stream.on_replayed(0, large(0))
    assert stream.on_replay_end(True).replay == ReplayNeeded(0, False, "gap")  # the loss is seen
    stream.on_disconnect()
    assert (stream.held_batches, stream.held_bytes) == (0, 0)


def test_an_unreadable_live_batch_behind_the_end_of_a_replay_is_asked_for() -> None:
    """The engine had answered before it published it: nothing else would show that it is missing."""
    stream = EventStream(True)
    stream.on_connect()
    assert stream.on_live(2, None).held
    stream.on_replayed(0, batch(0))
    stream.on_replayed(1, batch(1))
    step = stream.on_replay_end(True)
    assert step.replay == ReplayNeeded(1, False, "undecodable")
    assert not stream.state.has_claim
    stream.on_replayed(1, batch(1))
    assert stream.on_replayed(2, None).clear  # what it removed is unknown
    assert stream.on_replay_end(True) == Step()
    assert (stream.state, stream.next_seq, stream.known_empty_start) == (ClaimState.PARTIAL, 3, False)


def test_an_unreadable_live_batch_that_the_engine_never_repeats_is_asked_for_once() -> None:
    stream = live_stream(3)
    stream.on_live(5, batch(5))
    assert stream.on_live(6, None).held
    assert replay(stream, range(2, 5)).replay == ReplayNeeded(5, False, "undecodable")
    assert replay(stream, [5]) == Step(clear=True)  # what it removed is unknown
    assert (stream.state, stream.next_seq, stream.known_empty_start) == (ClaimState.PARTIAL, 7, False)
    assert seqs(stream.on_live(7, batch(7))) == [7]


def test_an_engine_that_denies_unreadable_batches_is_not_asked_for_ever() -> None:
    stream = live_stream(3)
    stream.on_live(3, None)
    stream.on_live(4, None)
    asked = []
    for _ in range(4):
        for seq in range(3):
            stream.on_replayed(seq, batch(seq))
        stream.on_replayed(3, None)
        asked.append(stream.on_replay_end(True).replay is not None)
    assert asked == [True, False, False, False]
    assert (stream.state, stream.next_seq) == (ClaimState.PARTIAL, 5)


def test_held_batches_older_than_the_remembered_digests_are_no_restart() -> None:
    stream = EventStream(True, StreamLimits(digests=4))
    stream.on_connect()
    for seq in range(2, 30):
        stream.on_live(seq, batch(seq))
    assert replay(stream, range(30)).replay is None
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 30)


def test_without_replay_the_first_resolvable_store_makes_a_partial_claim() -> None:
    stream = EventStream(False)
    assert stream.on_connect() == Step()
    assert seqs(stream.on_live(5, batch(5))) == [5]
    assert stream.state is ClaimState.UNKNOWN
    stream.on_resolved_store()
    assert (stream.state, stream.known_empty_start) == (ClaimState.PARTIAL, False)
    gap = stream.on_live(8, batch(8))
    assert gap.clear
    assert seqs(gap) == [8]
    assert stream.state is ClaimState.UNKNOWN


def test_without_replay_the_first_event_of_all_makes_an_exact_claim() -> None:
    stream = EventStream(False)
    stream.on_live(0, batch(0))
    assert (stream.state, stream.known_empty_start) == (ClaimState.LIVE, True)
    assert stream.on_live(1, None) == Step(clear=True)
    assert stream.state is ClaimState.UNKNOWN
    assert seqs(stream.on_live(2, batch(2))) == [2]


def test_without_replay_a_disconnect_drops_everything() -> None:
    stream = EventStream(False)
    stream.on_live(0, batch(0))
    assert stream.on_disconnect() == Step(clear=True)
    assert (stream.state, stream.next_seq) == (ClaimState.UNKNOWN, None)


class Engine:
    """An engine that restarts and forgets, behind a network that loses, corrupts and disconnects."""

    BUFFER = 6

    def __init__(self, stream: EventStream, rng: random.Random) -> None:
        self.stream, self.rng = stream, rng
        self.process = self.published = 0
        self.applied: list[tuple[int, int]] = []  # (process, seq)
        self.replaying: list[tuple[int, int]] | None = None

    def perform(self, step: Step) -> None:
        if step.clear:
            self.applied.clear()
        self.applied.extend(divmod(b.digest - 1, 10**6) for b in step.apply)
        if step.replay is not None:
            first = max(step.replay.from_seq, self.published - self.BUFFER)
            everything = [(self.process, seq) for seq in range(first, self.published)]
            self.replaying = [at for at in everything if self.rng.random() < 0.9]

    def publish(self) -> None:
        seq, self.published = self.published, self.published + 1
        if self.rng.random() < 0.85:
            self.perform(
                self.stream.on_live(seq, batch(seq, self.process) if self.rng.random() < 0.95 else None)
            )

    def answer(self) -> None:
        if self.replaying:
            process, seq = self.replaying.pop(0)
            self.perform(
                self.stream.on_replayed(seq, batch(seq, process) if self.rng.random() < 0.97 else None)
            )
        elif self.replaying is not None:
            self.replaying = None
            self.perform(self.stream.on_replay_end(self.rng.random() < 0.9))

    def reconnect(self, restarted: bool) -> None:
        self.replaying = None
        if restarted:
            self.process, self.published = self.process + 1, 0
        self.perform(self.stream.on_disconnect())
        self.perform(self.stream.on_connect())

    def check(self) -> None:
        run = [seq for _, seq in self.applied]
        assert len({process for process, _ in self.applied}) <= 1
        assert run == [run[0] + i for i in range(len(run))]
        if self.stream.state.has_claim and run:
            assert self.stream.next_seq == run[-1] + 1
            assert self.applied[0][0] == self.process
        if self.stream.known_empty_start:
            assert run == list(range(self.stream.next_seq or 0))


@pytest.mark.parametrize("has_replay", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_what_is_claimed_is_always_a_run_of_one_process_without_holes(has_replay: bool, seed: int) -> None:
    rng = random.Random(seed)
    limits = StreamLimits(held_batches=4, digests=64, failed_replays=3)
    engine = Engine(EventStream(has_replay, limits), rng)
    engine.perform(engine.stream.on_connect())
    for _ in range(150):
        action = rng.random()
        if action < 0.55:
            engine.publish()
        elif action < 0.95:
            engine.answer()
        else:
            engine.reconnect(restarted=action < 0.97)
        engine.check()
        assert engine.stream.held_batches <= limits.held_batches
    while engine.replaying is not None:  # left alone, every stream comes to a claim or to live traffic
        engine.answer()
    assert engine.stream.state is not ClaimState.SYNCING


def test_what_an_old_process_had_sent_last_is_not_inherited() -> None:
    """Found by the walk above: held back from the old process, applied after the new one's replay."""
    stream = EventStream(True)
    stream.on_connect()
    stream.on_live(0, batch(0, process=0))
    stream.on_disconnect()
    stream.on_connect()
    assert replay(stream, [], process=1) == Step()
    assert (stream.state, stream.next_seq) == (ClaimState.LIVE, 0)


class Restarting(Engine):
    """And a picker that restarts, now and then with a snapshot that any earlier state may have left."""

    def __init__(self, stream: EventStream, rng: random.Random) -> None:
        super().__init__(stream, rng)
        self.snapshots: list[tuple[StreamPosition, list[tuple[int, int]]]] = []
        self.confirmed = 0

    def keep_snapshot(self) -> None:
        position = self.stream.position
        if position is not None and self.applied:
            self.snapshots.append((position, list(self.applied)))

    def restart_picker(self, limits: StreamLimits) -> None:
        self.stream = EventStream(True, limits)
        self.applied, self.replaying = [], None
        if self.snapshots and self.rng.random() < 0.8:
            position, held = self.rng.choice(self.snapshots[-3:])
            self.stream.adopt(position)
            self.applied = list(held)
        self.perform(self.stream.on_connect())


@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_snapshots_of_any_age_and_process_never_make_a_claim_that_events_would_not(seed: int) -> None:
    rng = random.Random(seed)
    limits = StreamLimits(held_batches=4, digests=64, failed_replays=3)
    engine = Restarting(EventStream(True, limits), rng)
    engine.perform(engine.stream.on_connect())
    for _ in range(150):
        action = rng.random()
        if action < 0.45:
            engine.publish()
        elif action < 0.85:
            engine.answer()
        elif action < 0.92:
            engine.keep_snapshot()
        elif action < 0.97:
            engine.restart_picker(limits)
        else:
            engine.reconnect(restarted=action < 0.985)
        engine.check()
        assert not (engine.stream.unconfirmed and engine.stream.state.has_claim)
    while engine.replaying is not None:
        engine.answer()
        engine.check()
