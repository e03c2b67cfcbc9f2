"""Clients of a simulated fleet: open-loop stages and closed-loop conversations. They know no policy.

Everything random comes from a generator of the run's seed, so arms of one seed see the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from simulator.fleet import Fleet
from simulator.prompts import Content, random_tokens
from simulator.requests import Record

Size = int | tuple[float, float, int, int]  # a number, or (median, mean, low, high) of a cut lognormal


def draw(rng: random.Random, size: Size) -> int:
    """A number of tokens."""
    if isinstance(size, int):
        return size
    median, mean, low, high = size
    spread = math.sqrt(2 * math.log(mean / median))
    return min(max(round(rng.lognormvariate(math.log(median), spread)), low), high)


@dataclass(slots=True)
class Stage:
    """Requests that belong together in the results."""

    name: str
    began_s: float
    records: list[Record] = field(default_factory=list)
    window_s: float | None = None  # figures are of answers within it; None: until all have ended


@dataclass(frozen=True, slots=True)
class RateStages:
    """Open loop: Poisson arrivals over a pool of shared prefixes, one stage after the other has drained.

    `counted` and `dealt` are what inference-perf does (`ConstantLoadTimer`, its shared-prefix data): exactly
    rate x seconds requests whose gaps are scaled to the stage, and every prefix equally often, shuffled once.
    """

    prefixes: int
    prefix_tokens: Size
    question_tokens: int
    output_tokens: int
    rates_per_s: tuple[float, ...]
    stage_s: float | tuple[float, ...]  # of each stage
    warm_up_rate_per_s: float = 0.0
    warm_up_s: float = 0.0
    zipf: tuple[float, ...] = (0.0,)  # skews of the prefixes; 0: all are as likely. Each one has its stages
    timeout_s: float | None = None
    counted: bool = False
    dealt: bool = False

    def __post_init__(self) -> None:
        if self.dealt and any(self.zipf):
            raise ValueError("dealt prefixes are asked for equally often: they have no skew")

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        rng = random.Random(f"rates {seed}")
        size = fleet.shape.shape.block_tokens
        pool = [
            Content.of(random_tokens(rng, draw(rng, self.prefix_tokens)), size) for _ in range(self.prefixes)
        ]
        stages = []
        for skew in self.zipf:
            weights = [1 / (rank + 1) ** skew for rank in range(self.prefixes)]
            label = f"zipf {skew:g} " if len(self.zipf) > 1 else ""
            lengths = (
                self.stage_s if isinstance(self.stage_s, tuple) else [self.stage_s] * len(self.rates_per_s)
            )
            steps = [(r, s, f"{label}{r:g}") for r, s in zip(self.rates_per_s, lengths, strict=True)]
            if self.warm_up_s > 0:
                steps.insert(0, (self.warm_up_rate_per_s, self.warm_up_s, f"{label}warm-up"))
            deck = self._deck(rng, sum(rate * for_s for rate, for_s, _ in steps)) if self.dealt else None
            stages += [self._stage(fleet, rng, pool, weights, deck, *step) for step in steps]
        return stages

    def _deck(self, rng: random.Random, requests: float) -> Iterator[int]:
        """Prefixes of at least so many requests and of a tenth more, each equally often."""
        times = math.ceil(requests * 1.1 / self.prefixes) + 1
        deck = [prefix for prefix in range(self.prefixes) for _ in range(times)]
        rng.shuffle(deck)
        return itertools.cycle(deck)

    def _stage(
        self,
        fleet: Fleet,
        rng: random.Random,
        pool: list[Content],
        weights: list[float],
        deck: Iterator[int] | None,
        rate_per_s: float,
        for_s: float,
        name: str,
    ) -> Stage:
        stage = Stage(name, fleet.timeline.now_s)
        arrivals = list((_counted if self.counted else _poisson)(rng, rate_per_s, for_s))
        if deck is None:
            chosen = rng.choices(range(len(pool)), weights, k=len(arrivals))
        else:
            chosen = list(itertools.islice(deck, len(arrivals)))
        for offset_s, prefix in zip(arrivals, chosen, strict=True):
            fresh = random_tokens(rng, self.question_tokens + self.output_tokens)
            fleet.timeline.at(stage.began_s + offset_s, self._send, fleet, stage, prefix, pool[prefix], fresh)
        fleet.run()
        return stage

    def _send(self, fleet: Fleet, stage: Stage, prefix: int, shared: Content, fresh: array[int]) -> None:
        content = shared.followed_by(fresh)
        prompt_tokens = len(shared.tokens) + self.question_tokens
        stage.records.append(
            fleet.submit(
                content, prompt_tokens, self.output_tokens, tag=str(prefix), timeout_s=self.timeout_s
            )
        )


def _poisson(rng: random.Random, rate_per_s: float, for_s: float) -> Iterator[float]:
    at_s = rng.expovariate(rate_per_s)
    while at_s < for_s:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def _counted(rng: random.Random, rate_per_s: float, for_s: float) -> Iterator[float]:
    gaps = [rng.expovariate(rate_per_s) for _ in range(int(rate_per_s * for_s))]
    scale = for_s / sum(gaps) if gaps else 0.0
    return (at * scale for at in itertools.accumulate(gaps))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a conversation adds: a question and its answer, after a pause."""

    question_tokens: int
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation: the tokens that it begins with (a document), then its turns."""

    opening: array[int]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Closed loop: at most `concurrency` conversations, the next begins when one has ended.

    A turn that fails ends its conversation, unless `retry_s` says after which pause it is sent again (an
    engine that went away; a client that gave up does not come back). Every run sends the same texts again.
    """

    concurrency: int
    burst_s: float  # the first ones begin within
    runs: tuple[str, ...] = ("cold", "warm")
    timeout_s: float | None = None
    retry_s: float | None = None
    window_s: float | None = None  # nothing is sent after it

    def run(self, fleet: Fleet, scripts: Iterable[Script], seed: int) -> list[Stage]:
        wanted = list(scripts)
        return [self._once(fleet, wanted, seed, name) for name in self.runs]

    def _once(self, fleet: Fleet, scripts: list[Script], seed: int, name: str) -> Stage:
        rng = random.Random(f"conversations {seed}")  # the same texts in every run
        stage = Stage(name, fleet.timeline.now_s, window_s=self.window_s)
        texts = [_Text(script.opening, self._answers(rng, script)) for script in scripts]
        waiting = iter(
            [
                _Conversation(self, fleet, stage, s, t, f"{name} {n}")
                for n, (s, t) in enumerate(zip(scripts, texts, strict=True))
            ]
        )

        def begin_next() -> None:
            following = next(waiting, None)
            if following is not None:
                following.on_end = begin_next
                following.turn()

        starts = random.Random(f"starts {seed} {name}")
        for _ in range(min(self.concurrency, len(scripts))):
            fleet.timeline.after(starts.uniform(0, self.burst_s), begin_next)
        fleet.run()
        return stage

    def _answers(self, rng: random.Random, script: Script) -> array[int]:
        return random_tokens(rng, sum(t.question_tokens + t.output_tokens for t in script.turns))


@dataclass(slots=True)
class _Text:
    """All that a conversation will say, made and named when it begins."""

    opening: array[int]
    following: array[int]
    _whole: Content | None = None

    def first(self, tokens: int, block_tokens: int) -> Content:
        if self._whole is None:
            self._whole = Content.of(self.opening + self.following, block_tokens)
        return self._whole.first(tokens)


class _Conversation:
    def __init__(
        self,
        rules: Conversations,
        fleet: Fleet,
        stage: Stage,
        script: Script,
        text: _Text,
        session: str,
    ) -> None:
        self._session = session
        self._rules, self._fleet, self._stage, self._script = rules, fleet, stage, script
        self._text = text
        self._position = len(script.opening)  # in the text
        self._number = 0
        self.on_end = _nothing

    def turn(self) -> None:
        window_s = self._rules.window_s
        if window_s is not None and self._fleet.timeline.now_s >= self._stage.began_s + window_s:
            return
        turn = self._script.turns[self._number]
        end = self._position + turn.question_tokens + turn.output_tokens
        self._stage.records.append(
            self._fleet.submit(
                self._text.first(end, self._fleet.shape.shape.block_tokens),
                end - turn.output_tokens,
                turn.output_tokens,
                tag=f"turn {self._number}",
                session=self._session,
                timeout_s=self._rules.timeout_s,
                then=self._ended,
            )
        )
        self._position = end
        self._number += 1

    def _ended(self, record: Record) -> None:
        retry_s = self._rules.retry_s
        if record.failed and record.failed != "timeout" and retry_s is not None:
            self._number -= 1
            turn = self._script.turns[self._number]
            self._position -= turn.question_tokens + turn.output_tokens
            self._fleet.timeline.after(retry_s, self.turn)
            return
        if record.failed or self._number >= len(self._script.turns):
            self.on_end()
            return
        self._fleet.timeline.after(self._script.turns[self._number].think_s, self.turn)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Closed loop over one fresh prefix: warm-ups in turn, then `requests` by `concurrency` clients."""

    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    warm_ups: int
    requests: int
    concurrency: int
    burst_s: float

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        prefix = random_tokens(random.Random(f"shared {seed}"), self.prefix_tokens)
        script = Script(prefix, (Turn(self.question_tokens, self.output_tokens),))
        stages: list[Stage] = []
        for name, count, clients in (
            ("warm-up", self.warm_ups, 1),
            ("measured", self.requests, self.concurrency),
        ):
            conversations = Conversations(clients, self.burst_s, (name,))
            stages += conversations.run(fleet, [script] * count, seed + len(stages) * 1_000_003)
        return stages


def _nothing() -> None:
    return None
