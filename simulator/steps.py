"""Steps of engines that compute together: one engine alone, or the ranks of an expert-parallel instance.

Expert-parallel ranks exchange tokens in every layer, so a step of the instance takes as long as its slowest
rank's, and a rank that has nothing to do steps along (vLLM 0.32 `DPEngineCoreProc`: dummy batches until no
rank has work). Each device also computes its share of the experts for the tokens of all others.

Runs of equal decode steps are done at once and cut short when something comes in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epp.engine_model.batching import Portion
from simulator.requests import EngineRequest
from simulator.timeline import Timeline

Portions = list[Portion[EngineRequest]]


class Rank(Protocol):
    """What an engine does in a step."""

    def plan(self) -> Portions:
        """Mutates: admit what fits; what the next step computes here, empty: nothing."""
        ...

    def steps_ahead(self, request: EngineRequest) -> int: ...

    def step_s(self, portions: Portions, count: int = 1) -> float: ...

    def share_s(self, tokens: float) -> float:
        """Of the experts for so many prefilled tokens of other ranks."""
        ...

    def complete(self, portions: Portions, count: int, took_s: float) -> None:
        """Mutates: `count` such steps have been computed; they took `took_s` in all."""
        ...


@dataclass(slots=True)
class _Step:
    """What the ranks are doing: `count` equal steps from `began_s` on."""

    began_s: float
    parts: list[tuple[Rank, Portions]]
    ranks: int  # of the instance, those without work included
    count: int
    version: int = 0

    def seconds(self, count: int) -> float:
        """Of `count` steps: the slowest rank's, its share of the others' tokens included."""
        if len(self.parts) == 1:
            (rank, portions), *_ = self.parts
            return rank.step_s(portions, count)
        own = [_prefilled(portions) for _, portions in self.parts]
        total = sum(own)
        return max(
            [
                rank.step_s(portions, count) + rank.share_s((total - mine) / self.ranks)
                for (rank, portions), mine in zip(self.parts, own, strict=True)
            ]
        )


class Stepper:
    """The only place where steps begin and end. Every method is called at the timeline's now."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ranks: list[Rank] = []
        self._step: _Step | None = None
        self._versions = 0
        self._changing = False  # a step is ending or being planned
        self._woken = False

    def join(self, rank: Rank) -> None:
        self._ranks.append(rank)

    def wake(self) -> None:
        """Something is new: begin a step, or cut a run of decode steps short at its next boundary. While a
        step is ending nothing is done: the next one begins when every rank has what it computed."""
        step = self._step
        if self._changing:
            self._woken = True
        elif step is None:
            self._next()
        elif step.count > 1:
            count = _steps_begun(step, self._timeline.now_s - step.began_s)
            if count < step.count:
                step.count = count
                self._schedule(step)

    def drop(self, rank: Rank) -> None:
        """The rank's process has died: what it was computing is lost, the others go on."""
        if self._step is not None:
            self._step.parts = [part for part in self._step.parts if part[0] is not rank]
            if not self._step.parts:
                self._step = None
                self._versions += 1

    def _next(self) -> None:
        self._changing, self._woken = True, False
        parts = [(rank, portions) for rank in self._ranks if (portions := rank.plan())]
        self._changing = False
        if parts:
            self._step = _Step(self._timeline.now_s, parts, len(self._ranks), _steps_ahead(parts))
            self._schedule(self._step)
        elif self._woken:
            self._next()

    def _schedule(self, step: _Step) -> None:
        self._versions += 1
        step.version = self._versions
        self._timeline.at(step.began_s + step.seconds(step.count), self._complete, step.version)

    def _complete(self, version: int) -> None:
        step = self._step
        if step is None or step.version != version:
            return
        self._step, self._changing = None, True
        took_s = self._timeline.now_s - step.began_s
        for rank, portions in step.parts:
            rank.complete(portions, step.count, took_s)
        self._next()


def _prefilled(portions: Portions) -> int:
    return sum([p.stop - p.start for p in portions if p.is_prefill])


def _steps_ahead(parts: Sequence[tuple[Rank, Portions]]) -> int:
    """Equal steps that can be done at once: decode alone, until an answer ends or needs a block."""
    if any(p.is_prefill for _, portions in parts for p in portions):
        return 1
    return min([rank.steps_ahead(p.request) for rank, portions in parts for p in portions])


def _steps_begun(step: _Step, elapsed_s: float) -> int:
    low, high = 1, step.count
    while low < high:
        middle = (low + high) // 2
        if step.seconds(middle) >= elapsed_s:
            high = middle
        else:
            low = middle + 1
    return low
