"""The sequence of one engine's event batches: in order, gap, restart. Pure; holds no cache content.

    UNKNOWN --replay asked--> SYNCING --replayed to the end--> LIVE      everything from seq 0 was seen
                                 ^                        \\--> PARTIAL   the beginning is lost: lower bound
                                 +------ gap, undecodable batch, reconnect ------- LIVE, PARTIAL

While a replay runs, live batches are held back (bounded) and follow it in order, so a late replay
can never bring a removed block back (case S-C04). What a hole may have hidden are removals: if it
cannot be filled, everything held of the endpoint is dropped. A replay starts one batch early where
we remember that batch's digest: another digest there means another engine process. What was held
back may then be the dead one's: it is dropped, as are batches behind a hole that the engine denies. A
position adopted from a sibling is confirmed in the same way, from a few batches earlier on.

Without a usable replay socket: no claim until the first store that resolves, then PARTIAL.
The owner performs each `Step` (clear, then apply, then ask for a replay) before the next call.
"""

from __future__ import annotations

from dataclasses import replace

from epp.core.events import Batch, ReplayNeeded
from epp.core.held_batches import HeldBatches
from epp.core.stream_position import MAX_OVERLAP_BATCHES, Digests, StreamPosition
from epp.core.stream_step import DUPLICATE, HELD, NOTHING, RunningReplay, Step, StreamLimits
from epp.core.types import ClaimState


class EventStream:
    """State machine of one endpoint's stream between add and remove."""

    def __init__(self, has_replay: bool, limits: StreamLimits | None = None) -> None:
        self.state = ClaimState.UNKNOWN
        self.next_seq: int | None = None  # None: no position yet
        self._has_replay = has_replay
        self._limits = limits or StreamLimits()
        self._replay_usable = has_replay
        self._failed_replays = 0
        self._exact = False  # everything since seq 0 is in what we hold
        self._replay: RunningReplay | None = None
        self._down = False  # between a disconnect and the next connect
        self._held = HeldBatches(self._limits)
        self._held_denied = False  # a replay ended short of them: they may be another process's
        self._unread_seq: int | None = None  # newest live batch since the last drop that we cannot read
        self._digests = Digests(self._limits.digests)
        self.unconfirmed = False  # a sibling's position, which the engine has not repeated yet

    @property
    def known_empty_start(self) -> bool:
        """We saw this engine process from its first event on."""
        return self._exact and self.state.has_claim

    @property
    def held_batches(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return self._held.size_bytes

    # --- positions of siblings ------------------------------------------------------------------

    @property
    def position(self) -> StreamPosition | None:
        """Where a sibling can go on; None without a claim, or where no engine could confirm it."""
        if not self.state.has_claim or not self._replay_usable or not self._recognisable:
            return None
        assert self.next_seq is not None
        return StreamPosition(self.next_seq, self._exact, self._digests.last(MAX_OVERLAP_BATCHES))

    @property
    def can_adopt(self) -> bool:
        """Only before anything was heard: what this picker itself saw is never overwritten."""
        return self._has_replay and self.state is ClaimState.UNKNOWN and self.next_seq is None

    def adopt(self, position: StreamPosition) -> None:
        """Go on from where a sibling stood; `can_adopt` must hold. Nothing is claimed before the
        engine has repeated the last batch before it, and everything after it."""
        first = position.next_seq - len(position.digests)
        for at, digest in enumerate(position.digests):
            self._digests.add(first + at, digest)
        self.next_seq = position.next_seq
        self._exact = position.exact
        self.unconfirmed = True

    def distrust(self) -> None:
        """What was held was dropped on other evidence: with what comes it is a lower bound."""
        self._exact = False
        if self.state is ClaimState.LIVE:
            self.state = ClaimState.PARTIAL

    def refuse_adopted(self) -> Step:
        """What was adopted contradicts what the engine repeats: drop it, and hear the engine out."""
        return self._begin(0, clear=True, reason="snapshot_refused")

    # --- the connection -------------------------------------------------------------------------

    def on_connect(self) -> Step:
        """The subscription is (again) in place; it may be another process than before."""
        self._down = False
        if self._replay is not None:
            return NOTHING  # begun after the last disconnect, so it already asks the right process
        self._failed_replays = 0
        self._replay_usable = self._has_replay
        if self._replay_usable:
            return self._resync(self._contact_reason)
        return self._forget() if self.next_seq is not None else NOTHING

    def on_disconnect(self) -> Step:
        """Events may be missed from now on: no claim until the same process is heard again."""
        self._down = True
        self._replay = None
        self._drop_held()  # the next process must not inherit them; the same one replays them
        if not self._replay_usable:
            return self._forget() if self.next_seq is not None else NOTHING
        if self.state.has_claim:
            self.state = ClaimState.SYNCING
        return NOTHING

    # --- live batches ---------------------------------------------------------------------------

    def on_live(self, seq: int, batch: Batch | None) -> Step:
        """One batch from the subscription. None: it could not be decoded."""
        if self._down:
            return NOTHING  # late, of a process that may be gone; if it is not, it replays this one
        if not self._replay_usable:
            return self._on_live_unrepairable(seq, batch)
        if not self.state.has_claim:
            return self._on_live_syncing(seq, batch)
        assert self.next_seq is not None
        if seq < self.next_seq:
            return DUPLICATE if self._is_repeat(seq, batch) else self._restart(seq, batch)
        if seq == self.next_seq and batch is not None:
            self._accept(seq, batch)
            return Step(apply=(batch,))
        self._hold(seq, batch)
        return self._resync("gap" if batch is not None else "undecodable")

    def _on_live_syncing(self, seq: int, batch: Batch | None) -> Step:
        if self._held and seq <= self._held.last[0]:
            last_seq, last = self._held.last
            if batch is None or (seq == last_seq and batch.digest == last.digest):
                return DUPLICATE
            return self._restart(seq, batch)
        self._hold(seq, batch)
        if self._replay is None:
            return self._resync(self._contact_reason)
        return HELD

    def _on_live_unrepairable(self, seq: int, batch: Batch | None) -> Step:
        if self.next_seq is not None and seq < self.next_seq and self._is_repeat(seq, batch):
            return DUPLICATE
        clear = False
        if seq != self.next_seq or batch is None:
            clear = self.next_seq is not None
            self._forget()
        if batch is None:
            self.next_seq = seq + 1
            return Step(clear=clear)
        self._exact = self._exact or seq == 0
        self._accept(seq, batch)
        if self._exact:
            self.state = ClaimState.LIVE
        return Step(clear=clear, apply=(batch,))

    def on_resolved_store(self) -> None:
        """The owner's index could resolve a store: without a replay that is the first claim."""
        if not self._replay_usable and self.state is ClaimState.UNKNOWN:
            self.state = ClaimState.PARTIAL

    # --- replayed batches -----------------------------------------------------------------------

    def on_replayed(self, seq: int, batch: Batch | None) -> Step:
        """One batch of the replay asked for last."""
        replay = self._replay
        if replay is None:
            return DUPLICATE
        assert self.next_seq is not None
        if seq == replay.verify_seq:
            if batch is None or batch.digest != self._digests.get(seq):
                return self._restart_from_zero()
            replay.verify_seq = None
            self.unconfirmed = False
            return DUPLICATE
        if seq < self.next_seq:
            return self._restart_from_zero() if self._contradicts(seq, batch) else DUPLICATE
        if seq > self.next_seq and replay.progressed and self._recognisable:
            return self._resync("gap")  # lost on the way, not gone: ask again
        # the engine's buffer does not reach back that far, or it holds a batch we cannot read
        clear = seq > self.next_seq or batch is None or replay.verify_seq is not None
        if clear:
            self._forget_content()
        replay.verify_seq = None
        replay.progressed = True
        if batch is None:
            self.next_seq = seq + 1
            return Step(clear=clear)
        self._accept(seq, batch)
        return Step(clear=clear, apply=(batch,))

    def on_replay_end(self, ok: bool) -> Step:
        """The replay asked for last is over: end marker seen (`ok`), or failed."""
        replay = self._replay
        if replay is None:
            return NOTHING
        if not ok:
            self._failed_replays += 1
            if self._failed_replays >= self._limits.failed_replays:
                return self._go_on_without_replay()
            return self._begin(0, clear=True, reason="replay_failed")
        if replay.verify_seq is not None:  # an engine that has forgotten its own last batch is another one
            return self._restart_from_zero()
        return self._drain(replay)

    def on_replay_cut(self) -> Step:
        """The replay asked for last was stopped on our side: go on from where it got to."""
        if self._replay is not None and self._replay.progressed and self._recognisable:
            return self._resync("cut")
        return self.on_replay_end(False)

    def _drain(self, replay: RunningReplay) -> Step:
        """Apply what was held back during the replay, in order."""
        applied: list[Batch] = []
        while self._held:
            assert self.next_seq is not None
            seq, batch = self._held.first
            if seq > self.next_seq:
                break
            if seq < self.next_seq:
                if self._contradicts(seq, batch):
                    return self._restart_from_zero()
                self._held.pop()
                continue
            self._held.pop()
            self._accept(seq, batch)
            applied.append(batch)
        if not self._held:
            return self._catch_up(replay, tuple(applied))
        if (applied or replay.progressed) and self._recognisable:
            return replace(self._resync("gap"), apply=tuple(applied))
        # the engine says it has no more, yet sent later ones: the hole stays
        self._held_denied = True
        self._failed_replays += 1
        if self._failed_replays >= self._limits.failed_replays:
            return self._go_on_without_replay()
        return self._begin(0, clear=True, reason="replay_failed")

    def _catch_up(self, replay: RunningReplay, applied: tuple[Batch, ...]) -> Step:
        """Everything is applied, unless the newest live batch was unreadable: no later one shows the hole."""
        assert self.next_seq is not None
        unread_seq, clear = self._unread_seq, False
        if unread_seq is not None and self.next_seq <= unread_seq:
            news = (replay.progressed or applied) and self._recognisable
            if news or replay.unread_seq != unread_seq:
                return replace(self._resync("undecodable"), apply=applied)
            clear, self.next_seq = True, unread_seq + 1  # asked for, and not repeated: go past it
            self._forget_content()
        self._replay = self._unread_seq = None
        self._held_denied = False
        self._failed_replays = 0
        self.state = ClaimState.LIVE if self._exact else ClaimState.PARTIAL
        return Step(clear=clear, apply=applied)

    def _go_on_without_replay(self) -> Step:
        self._replay_usable = False
        self._forget()
        held = [] if self._held_denied else list(self._held)
        self._drop_held()
        run: list[Batch] = []
        for seq, batch in held:
            if self._on_live_unrepairable(seq, batch).clear:
                run.clear()
            run.append(batch)
        return Step(clear=True, apply=tuple(run))

    # --- parts ----------------------------------------------------------------------------------

    def _resync(self, reason: str) -> Step:
        """Replay what is missing; from the last applied batch on, if we can recognise it."""
        if self.next_seq is None or self.next_seq == 0:
            return self._begin(0, clear=False, reason=reason)
        if self._recognisable:
            last = self.next_seq - 1
            from_seq = self._digests.oldest if self.unconfirmed else last
            self._replay = RunningReplay(last, self._unread_seq)
            self.state = ClaimState.SYNCING
            return Step(replay=ReplayNeeded(from_seq, False, reason))
        return self._begin(0, clear=True, reason=reason)

    def _begin(self, from_seq: int, *, clear: bool, reason: str) -> Step:
        """Start over with a replay from the very beginning."""
        self.next_seq = from_seq
        self._exact = True  # until the replay turns out not to begin there
        self._digests.clear()
        self.unconfirmed = False
        self._replay = RunningReplay(None, self._unread_seq)
        self.state = ClaimState.SYNCING
        return Step(clear=clear, replay=ReplayNeeded(from_seq, clear, reason))

    def _restart_from_zero(self) -> Step:
        """Another process: what was held back may be the old one's, and the new one replays its own."""
        self._drop_held()
        return self._begin(0, clear=True, reason="restart")

    def _restart(self, seq: int, batch: Batch | None) -> Step:
        """A live batch of another process: unlike what was held back before, it is the new one's."""
        step = self._restart_from_zero()
        self._hold(seq, batch)
        return step

    def _forget(self) -> Step:
        """Start over without a replay."""
        self._replay = None
        self.next_seq = None
        self._forget_content()
        self.state = ClaimState.UNKNOWN
        return Step(clear=True)

    def _forget_content(self) -> None:
        self._exact = self.unconfirmed = False
        self._digests.clear()

    def _accept(self, seq: int, batch: Batch) -> None:
        self.next_seq = seq + 1
        self._digests.add(seq, batch.digest)

    def _is_repeat(self, seq: int, batch: Batch | None) -> bool:
        """A batch below our position that we have applied. One that we cannot read says nothing."""
        return batch is None or self._digests.get(seq) == batch.digest

    def _contradicts(self, seq: int, batch: Batch | None) -> bool:
        """A batch below our position that cannot come from the process we have followed."""
        known = self._digests.get(seq)
        return batch is not None and known is not None and batch.digest != known

    @property
    def _contact_reason(self) -> str:
        if self.next_seq is None:
            return "first_contact"
        return "snapshot" if self.unconfirmed else "reconnect"

    @property
    def _recognisable(self) -> bool:
        """Whether we would know the last applied batch again."""
        return self.next_seq is not None and self._digests.get(self.next_seq - 1) is not None

    def _hold(self, seq: int, batch: Batch | None) -> None:
        if batch is None:  # the hole it leaves is found when the held batches are applied
            self._unread_seq = seq
            return
        self._held.append(seq, batch)

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_denied = False
        self._unread_seq = None
