"""Pulls between modelled engines: session, floor, fair-shared bytes, deadline; never a failed request.

Semantics: the emulated engine's `pulls`: the source is asked what it holds when the pull arrives there, keeps
those blocks pinned while they are read, and keeps its copy. Whatever goes wrong is fewer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epp.core.types import CacheTier
from epp.engine_model.network import FairNetwork, Flow
from simulator.engine import SimulatedEngine
from simulator.requests import EngineRequest
from simulator.tiers import SlotNumbers, Tier
from simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PullLimits:
    """As the engine plugin's: `base_s` plus the time to compute the blocks, at most `max_s`."""

    base_s: float = 2.0
    max_s: float = 10.0

    def deadline_s(self, recompute_s: float) -> float:
        return min(self.base_s + recompute_s, self.max_s)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a pull in progress keeps from being reused, in the tiers that it began with."""

    theirs: Tier
    ours: Tier
    pinned: SlotNumbers  # in the source's CPU tier
    slots: SlotNumbers  # in the destination's, not named yet


@dataclass(eq=False, slots=True)
class _Pull:
    request: EngineRequest
    source: SimulatedEngine
    destination: SimulatedEngine
    first: int  # block
    began_s: float
    deadline_s: float
    flow: Flow | None = None
    held: _Held | None = None
    over: bool = False


class Pulls:
    """All transfers of a fleet."""

    def __init__(self, timeline: Timeline, network: FairNetwork, limits: PullLimits | None = None) -> None:
        self._timeline = timeline
        self._network = network
        self._limits = limits or PullLimits()
        self._sessions: set[tuple[str, str]] = set()
        self._flows: dict[Flow, _Pull] = {}
        self._open: dict[_Pull, None] = {}
        self._version = 0
        self.moved_tokens = 0
        self.count = 0

    @property
    def open(self) -> int:
        return len(self._open)

    def warm(self, pairs: Sequence[tuple[str, str]]) -> None:
        """These pairs have pulled before: no session to set up."""
        self._sessions.update(pairs)

    def begin(
        self, source: SimulatedEngine, destination: SimulatedEngine, request: EngineRequest, first: int
    ) -> None:
        """`destination` fetches what follows `first` blocks of the prompt; ends with `part_has_come`."""
        now_s, profile = self._timeline.now_s, destination.profile
        held_tokens = first * destination.shape.block_tokens
        recompute_s = profile.timing.recompute_ms(request.prompt_tokens, held_tokens) * 1e-3
        pull = _Pull(request, source, destination, first, now_s, now_s + self._limits.deadline_s(recompute_s))
        self._open[pull] = None
        pair = (source.name, destination.name)
        delay_s = profile.transfer.floor_s
        if pair not in self._sessions:
            self._sessions.add(pair)
            delay_s += profile.transfer.session_s
        if source is destination:
            self._timeline.after(0.0, self._end, pull, "self")
            return
        self._timeline.after(delay_s, self._transfer, pull)
        self._timeline.at(pull.deadline_s, self._end, pull, "deadline")

    def forget_engine(self, name: str) -> None:
        """The engine's process has died: its pulls end, its sessions are gone."""
        self._sessions = {pair for pair in self._sessions if name not in pair}
        for pull in [p for p in self._open if name in (p.source.name, p.destination.name)]:
            self._end(pull, "peer")

    def _transfer(self, pull: _Pull) -> None:
        if pull.over:
            return
        source, destination, request = pull.source, pull.destination, pull.request
        if not source.alive:
            self._end(pull, "peer")
            return
        names = request.content.names[pull.first : (request.prompt_tokens - 1) // source.shape.block_tokens]
        theirs, ours = source.cache.cpu, destination.cache.cpu
        pinned = theirs.prefix(names)
        wanted = min(len(pinned), ours.available)
        allocated = ours.allocate(wanted) if wanted else None
        if allocated is None:
            self._end(pull, "no_slots" if pinned else "miss")
            return
        slots, evicted = allocated
        destination.events.removed(CacheTier.CPU, evicted)
        pull.held = _Held(theirs, ours, pinned[:wanted], slots)
        theirs.touch(names[:wanted])
        theirs.pin(pull.held.pinned)
        tokens = wanted * source.shape.block_tokens
        transfer = destination.profile.transfer
        size = tokens * destination.profile.kv_bytes_per_token
        pull.flow = Flow(source.name, destination.name, size, transfer.stream_bytes_per_s)
        self._flows[pull.flow] = pull
        self._network.start(pull.flow, self._timeline.now_s)
        self._watch()

    def _watch(self) -> None:
        """Rates have changed: when does the next transfer end?"""
        self._version += 1
        next_s = self._network.next_end_s()
        if next_s is not None:
            self._timeline.at(next_s, self._some_ended, self._version)

    def _some_ended(self, version: int) -> None:
        if version != self._version:
            return
        for flow in self._network.finish(self._timeline.now_s):
            self._end(self._flows[flow], "ok")
        self._watch()

    def _end(self, pull: _Pull, reason: str) -> None:
        """The one end of every pull; idempotent."""
        if pull.over:
            return
        pull.over = True
        del self._open[pull]
        request, destination = pull.request, pull.destination
        if pull.flow is not None:
            del self._flows[pull.flow]
            if reason != "ok":
                self._network.cancel(pull.flow, self._timeline.now_s)
                self._watch()
        kept = self._keep(pull) if reason == "ok" else self._give_back(pull)
        tokens = kept * destination.shape.block_tokens
        record = request.record
        if not request.handed_over:
            record.pulled_tokens += tokens
            record.pulled_bytes += tokens * destination.profile.kv_bytes_per_token
            record.pull_s = self._timeline.now_s - pull.began_s
            record.pull_end = reason
            self.moved_tokens += tokens
            self.count += kept > 0
        if request.on_pull_end is not None:
            asked = (request.prompt_tokens - 1) // destination.shape.block_tokens - pull.first
            request.on_pull_end(request, reason, asked * destination.shape.block_tokens, tokens)
        if request.ordered:
            destination.events.flush()
        else:
            destination.part_has_come(request, kept)

    def _keep(self, pull: _Pull) -> int:
        """Name what has come, in the CPU tier of the destination; how many blocks."""
        held = pull.held
        assert held is not None
        if held.theirs is pull.source.cache.cpu:
            held.theirs.unpin(held.pinned)
        request, destination = pull.request, pull.destination
        if held.ours is not destination.cache.cpu:
            return 0
        names = request.content.names[pull.first : pull.first + len(held.slots)]
        fresh = held.ours.commit_all(held.slots, names)
        held.ours.unpin(held.slots)
        destination.pulled(request, pull.first, fresh)
        return len(held.slots)

    def _give_back(self, pull: _Pull) -> int:
        held = pull.held
        if held is not None:
            if held.theirs is pull.source.cache.cpu:
                held.theirs.unpin(held.pinned)
            if held.ours is pull.destination.cache.cpu:
                held.ours.unpin(held.slots)
        return 0
