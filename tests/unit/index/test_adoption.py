"""A sibling's view: adopted without a claim, confirmed by the engine's own replay, or dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine_plugin.identity import EndpointId
from epp.core.adoption import AdoptionRefused, ExportedView
from epp.core.cache_view import CacheView
from epp.core.events import (
    AllBlocksCleared,
    BatchResult,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    ReplayNeeded,
)
from epp.core.index_choice import IndexMaker
from epp.core.stream_position import MAX_OVERLAP_BATCHES, StreamPosition
from epp.core.stream_step import StreamLimits
from epp.core.types import CacheTier, ClaimState, EngineBlockHash, PrefixMatch, SchedulingRequest

A = EndpointId("a")
SEED = b"s" * 16
PROMPT = list(range(400))
BUFFER = 20  # batches that an engine can replay


def stored(*blocks: int, prompt: list[int] = PROMPT, tier: CacheTier = CacheTier.DEVICE) -> BlockStored:
    first = blocks[0]
    return BlockStored(
        tier,
        tuple(EngineBlockHash(b + 1) for b in blocks),
        EngineBlockHash(first) if first else None,
        prompt[first * 4 : (blocks[-1] + 1) * 4],
        4,
    )


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(CacheTier.DEVICE, tuple(EngineBlockHash(b + 1) for b in blocks))


class Engine:
    """Publishes to views, and answers their replays from a buffer that has wrapped."""

    def __init__(self, process: int = 0) -> None:
        self.process = process
        self.batches: list[EventBatch] = []

    def publish(self, *events: Event) -> EventBatch:
        batch = EventBatch(events, 0, self.process * 10**6 + len(self.batches) + 1)
        self.batches.append(batch)
        return batch

    def grow(self, blocks: int) -> None:
        """One batch a block, the first of all at the beginning."""
        for block in range(blocks):
            self.publish(stored(block))

    def connect(self, view: CacheView) -> list[int]:
        """Answer every replay until the view asks for no more; from where each was asked."""
        asked, answer = [], view.on_connect(A, 0.0)
        while isinstance(answer, ReplayNeeded):
            asked.append(answer.from_seq)
            assert len(asked) < 10
            answer = self._replay(view, answer.from_seq)
        return asked

    def _replay(self, view: CacheView, from_seq: int) -> BatchResult:
        first = max(from_seq, len(self.batches) - BUFFER)
        for seq in range(first, len(self.batches)):
            answer = view.on_batch(A, seq, self.batches[seq], 0.0, replayed=True)
            if isinstance(answer, ReplayNeeded):
                return answer
        return view.on_replay_end(A, True, 0.0)


def match(view: CacheView) -> PrefixMatch:
    return view.match(SchedulingRequest("r", token_ids=PROMPT), [A])[A]


NewView = Callable[..., CacheView]


@pytest.fixture
def new_view(make_index: IndexMaker) -> NewView:
    def make(has_replay: bool = True, seed: bytes = SEED) -> CacheView:

        view = CacheView(make_index(seed), StreamLimits(failed_replays=3))
        view.add_endpoint(A, has_replay)
        return view

    return make


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.grow(60)  # 40 of which no replay tells any more
    return engine


@pytest.fixture
def exported(new_view: NewView, engine: Engine) -> ExportedView:
    return export_of(new_view(), engine)


def export_of(view: CacheView, engine: Engine) -> ExportedView:
    """A replica that has heard the engine from its first batch on."""
    view.on_connect(A, 0.0)
    view.on_replay_end(A, True, 0.0)
    for seq, batch in enumerate(engine.batches):
        view.on_batch(A, seq, batch, 0.0)
    exported = view.export(A)
    assert exported is not None
    return exported


def test_without_a_snapshot_the_wrapped_part_is_lost(new_view: NewView, engine: Engine) -> None:
    """The control of what follows."""
    view = new_view()
    engine.connect(view)
    assert (match(view).state, match(view).blocks) == (ClaimState.PARTIAL, 0)


def test_an_adopted_view_claims_when_the_engine_has_repeated_its_last_batches(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    engine.publish(stored(60, 61))
    view = new_view()
    view.adopt(A, exported)
    assert (match(view).state, match(view).cached_tokens) == (ClaimState.UNKNOWN, 0)
    first = 60 - MAX_OVERLAP_BATCHES
    assert view.on_connect(A, 0.0) == ReplayNeeded(first, False, "snapshot")
    for seq in range(first, 61):
        view.on_batch(A, seq, engine.batches[seq], 0.0, replayed=True)
        assert match(view).cached_tokens == 0
    view.on_replay_end(A, True, 0.0)
    assert match(view) == PrefixMatch(ClaimState.LIVE, 62, 62, 0, 4, known_empty_start=True)
    counters = view.stats(A).counters
    assert (counters.snapshots_confirmed, counters.snapshots_refused, counters.clears) == (1, 0, 0)
    view.on_batch(A, 61, engine.publish(removed(10)), 1.0)
    assert match(view).blocks == 10


def test_a_lower_bound_stays_one(new_view: NewView, engine: Engine, exported: ExportedView) -> None:
    for changed in (
        replace(exported, position=replace(exported.position, exact=False)),
        replace(exported, dump=replace(exported.dump, complete=False)),
    ):
        view = new_view()
        view.adopt(A, changed)
        engine.connect(view)
        assert match(view) == PrefixMatch(ClaimState.PARTIAL, 60, 60, 0, 4)


def test_live_batches_during_the_confirming_replay_follow_it(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    view = new_view()
    view.adopt(A, exported)
    answer = view.on_connect(A, 0.0)
    engine.publish(removed(59))  # only the replay tells
    late = engine.publish(removed(58))
    view.on_batch(A, 61, late, 0.0)
    assert match(view).cached_tokens == 0
    assert isinstance(answer, ReplayNeeded)
    engine._replay(view, answer.from_seq)
    assert match(view).blocks == 58


def test_a_snapshot_of_another_process_is_dropped(new_view: NewView, exported: ExportedView) -> None:
    """The engine restarted between the snapshot and the replay; whatever it has sent since."""
    for batches in (0, 3, 59, 60, 75):
        heir = Engine(process=1)
        heir.grow(batches)
        view = new_view()
        view.adopt(A, exported)
        heir.connect(view)
        cold = new_view()
        heir.connect(cold)
        assert match(view) == match(cold)
        assert view.stats(A).index == cold.stats(A).index
        assert view.stats(A).counters.snapshots_refused == 1


def test_a_snapshot_older_than_the_engines_buffer_is_dropped(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    for _ in range(BUFFER + 5):
        engine.publish(removed(3))  # batches that the old snapshot lacks
    view = new_view()
    view.adopt(A, exported)
    assert engine.connect(view) == [60 - MAX_OVERLAP_BATCHES]  # no second replay: this one was heard
    assert (match(view).state, match(view).blocks) == (ClaimState.PARTIAL, 0)
    assert view.stats(A).counters.snapshots_refused == 1
    assert view.stats(A).index.device_blocks == 0


@pytest.mark.parametrize("missing", [1, 2, 15])
def test_a_buffer_that_reaches_only_into_the_overlap_is_enough(
    new_view: NewView, engine: Engine, exported: ExportedView, missing: int
) -> None:
    for _ in range(BUFFER - MAX_OVERLAP_BATCHES + missing):
        engine.publish(removed(59))
    view = new_view()
    view.adopt(A, exported)
    engine.connect(view)
    assert (match(view).state, match(view).blocks) == (ClaimState.LIVE, 59)


@pytest.mark.parametrize(
    "position",
    [
        StreamPosition(2**63 - 1, True, (1,)),  # far ahead of the engine
        StreamPosition(60, True, (60 + 1,)),  # a digest that the engine never sent
        StreamPosition(60, True, (5, 60)),  # right at the end, wrong before
        StreamPosition(1, True, (1,)),  # true, but long gone from the buffer
    ],
)
def test_a_made_up_position_makes_no_claim(
    new_view: NewView, engine: Engine, exported: ExportedView, position: StreamPosition
) -> None:
    view = new_view()
    view.adopt(A, replace(exported, position=position))
    engine.connect(view)
    assert (match(view).state, match(view).blocks) == (ClaimState.PARTIAL, 0)
    assert view.stats(A).counters.snapshots_refused == 1
    assert view.stats(A).index.waiting_blocks == BUFFER  # as a cold start has it


@pytest.mark.parametrize(
    "position",
    [
        StreamPosition(0, True, (1,)),
        StreamPosition(-1, True, (1,)),
        StreamPosition(2**63, True, (1,)),
        StreamPosition(5, True, ()),
        StreamPosition(2, True, (1, 2, 3)),
        StreamPosition(99, True, tuple(range(MAX_OVERLAP_BATCHES + 1))),
        StreamPosition(5, True, (-1,)),
        StreamPosition(5, True, (2**64,)),
    ],
)
def test_what_cannot_be_a_position_is_refused_at_once(
    new_view: NewView, exported: ExportedView, position: StreamPosition
) -> None:
    view = new_view()
    with pytest.raises(AdoptionRefused) as refused:
        view.adopt(A, replace(exported, position=position))
    assert refused.value.reason == "position"
    assert view.stats(A).index.device_blocks == 0
    assert view.on_connect(A, 0.0) == ReplayNeeded(0, False, "first_contact")


def test_a_refused_dump_leaves_the_endpoint_as_it_was(new_view: NewView, exported: ExportedView) -> None:
    view = new_view()
    for dump in (replace(exported.dump, scheme="other"), replace(exported.dump, keys=exported.dump.keys[8:])):
        with pytest.raises(AdoptionRefused):
            view.adopt(A, replace(exported, dump=dump))
        assert view.stats(A).index.device_blocks == 0
    view.adopt(A, exported)


def root_engine(*more: Event) -> Engine:
    """Everything is told again within the overlap."""
    engine = Engine()
    engine.grow(30)
    engine.publish(stored(*range(30)))
    for event in more:
        engine.publish(event)
    return engine


def test_content_of_another_seed_is_refused_by_what_the_engine_repeats(new_view: NewView) -> None:
    engine = root_engine()
    view = new_view()
    view.adopt(A, export_of(new_view(seed=b"t" * 16), engine))
    assert engine.connect(view)[1:] == [0]
    assert view.stats(A).counters.snapshots_refused == 1
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 30, 30, 0, 4)


@pytest.mark.parametrize("column", ["keys", "names"])
def test_altered_content_is_refused_by_what_the_engine_repeats(new_view: NewView, column: str) -> None:
    engine = root_engine()
    exported = export_of(new_view(), engine)
    raw = bytearray(getattr(exported.dump, column))
    raw[7 * 8 + 6] ^= 1
    view = new_view()
    view.adopt(A, replace(exported, dump=replace(exported.dump, **{column: bytes(raw)})))
    engine.connect(view)
    assert view.stats(A).counters.snapshots_refused == 1
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 30, 30, 0, 4)


def test_blocks_that_the_overlap_stored_must_be_there_unless_removed_later(new_view: NewView) -> None:
    engine = root_engine(removed(*range(20, 30)), removed(*range(20, 30)))  # both copies
    exported = export_of(new_view(), engine)
    fewer = Engine()
    fewer.grow(15)
    short = replace(exported, dump=export_of(new_view(), fewer).dump)
    view = new_view()
    view.adopt(A, short)
    engine.connect(view)
    assert view.stats(A).counters.snapshots_refused == 1
    view = new_view()
    view.adopt(A, exported)
    engine.connect(view)
    assert match(view) == PrefixMatch(ClaimState.LIVE, 20, 20, 0, 4, known_empty_start=True)
    view = new_view()
    view.adopt(A, replace(short, dump=replace(short.dump, complete=False)))  # says itself that it lacks some
    engine.connect(view)
    assert match(view) == PrefixMatch(ClaimState.PARTIAL, 15, 15, 0, 4)


def test_what_came_before_a_clear_need_not_be_there(new_view: NewView) -> None:
    engine = root_engine(AllBlocksCleared(), stored(0, 1))
    view = new_view()
    view.adopt(A, export_of(new_view(), engine))
    engine.connect(view)
    assert match(view) == PrefixMatch(ClaimState.LIVE, 2, 2, 0, 4, known_empty_start=True)


def test_only_claims_that_an_engine_can_confirm_are_exported(new_view: NewView, engine: Engine) -> None:
    view = new_view()
    assert view.export(A) is None
    view.on_connect(A, 0.0)
    assert view.export(A) is None  # SYNCING
    view.on_replay_end(A, True, 0.0)
    assert view.export(A) is None  # nothing to recognise the engine by
    view.on_batch(A, 0, engine.batches[0], 0.0)
    assert view.export(A) is not None
    view.on_batch(A, 5, engine.batches[5], 0.0)
    assert view.export(A) is None  # a gap
    assert view.export(EndpointId("b")) is None
    mute = new_view(has_replay=False)
    mute.on_batch(A, 0, engine.batches[0], 0.0)
    assert mute.state(A) is ClaimState.LIVE
    assert mute.export(A) is None


def test_a_view_that_is_not_confirmed_yet_is_not_passed_on(new_view: NewView, exported: ExportedView) -> None:
    view = new_view()
    view.adopt(A, exported)
    assert view.export(A) is None
    view.on_connect(A, 0.0)
    assert view.export(A) is None


def test_what_this_picker_has_seen_itself_is_not_overwritten(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    started = new_view()
    started.on_connect(A, 0.0)
    live = new_view()
    export_of(live, root_engine())
    adopted = new_view()
    adopted.adopt(A, exported)
    without_replay = new_view(has_replay=False)
    for view in (started, live, adopted, without_replay):
        before = view.stats(A).index
        with pytest.raises(AdoptionRefused) as refused:
            view.adopt(A, exported)
        assert refused.value.reason == "started"
        assert view.stats(A).index == before
    with pytest.raises(AdoptionRefused) as refused:
        started.adopt(EndpointId("b"), exported)
    assert refused.value.reason == "unknown_endpoint"


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_disconnect_while_unconfirmed_only_delays(
    new_view: NewView, engine: Engine, exported: ExportedView, when: str
) -> None:
    view = new_view()
    view.adopt(A, exported)
    if when == "during":
        view.on_connect(A, 0.0)
        view.on_batch(A, 50, engine.batches[50], 0.0, replayed=True)
    view.on_disconnect(A, 0.0)
    assert match(view).cached_tokens == 0
    assert engine.connect(view) == [60 - MAX_OVERLAP_BATCHES]
    assert (match(view).state, match(view).blocks) == (ClaimState.LIVE, 60)


def test_a_failed_replay_drops_what_was_adopted(new_view: NewView, exported: ExportedView) -> None:
    view = new_view()
    view.adopt(A, exported)
    view.on_connect(A, 0.0)
    assert view.on_replay_end(A, False, 0.0) == ReplayNeeded(0, True, "replay_failed")
    assert view.stats(A).index.device_blocks == 0
    assert view.stats(A).counters.snapshots_refused == 1


def test_an_undecodable_batch_confirms_nothing(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    view = new_view()
    view.adopt(A, exported)
    view.on_connect(A, 0.0)
    for seq in range(60 - MAX_OVERLAP_BATCHES, 59):
        view.on_batch(A, seq, None if seq == 50 else engine.batches[seq], 0.0, replayed=True)
    answer = view.on_batch(A, 59, None, 0.0, replayed=True)
    assert answer == ReplayNeeded(0, True, "restart")
    assert view.stats(A).index.device_blocks == 0


def test_a_view_is_taken_over_in_steps_and_is_then_the_same(
    new_view: NewView, engine: Engine, exported: ExportedView
) -> None:
    view = new_view()
    assert list(view.adopt_steps(A, exported, 16)) == [16, 32, 48, 60]
    engine.connect(view)
    assert (match(view).state, match(view).blocks) == (ClaimState.LIVE, 60)


@pytest.mark.parametrize("ends", [CacheView.distrust, CacheView.remove_endpoint])
def test_a_view_that_ends_between_two_steps_takes_over_nothing(
    new_view: NewView, exported: ExportedView, ends: Callable[[CacheView, EndpointId], None]
) -> None:
    view = new_view()
    steps = view.adopt_steps(A, exported, 16)
    assert next(steps) == 16
    ends(view, A)
    with pytest.raises(AdoptionRefused, match="overtaken"):
        next(steps)
    assert view.state(A) is ClaimState.UNKNOWN
    view.remove_endpoint(A)
    view.add_endpoint(A, has_replay=True)
    assert view.stats(A).index.device_blocks == 0
