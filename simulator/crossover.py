"""The tables that a model was fitted to, through the engine model: what the fit is worth, in-sample.

Crossover: one warmed pair, one request at a time.

As it was published: a fresh prefix is seeded on one endpoint, then the same prompt runs on a cold one, once
with the first as its source and once without. Decode: one endpoint, so many streams.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from epp.engine_model.network import FairNetwork
from epp.engine_model.profile import ModelProfile
from simulator.calibration import STACK, TAIL_TOKENS, CalibratedModel
from simulator.engine import EngineShape, SimulatedEngine
from simulator.prompts import Content, random_tokens
from simulator.pulls import PullLimits, Pulls
from simulator.requests import EngineRequest, Record
from simulator.timeline import Timeline

_SHAPE = EngineShape(block_tokens=16, device_tokens=400_000, cpu_tokens=800_000)


@dataclass(frozen=True, slots=True)
class CrossoverRow:
    """One prefix length; milliseconds to the first token."""

    prefix_tokens: int
    published_recompute_ms: float
    simulated_recompute_ms: float
    published_pull_ms: float
    simulated_pull_ms: float

    @property
    def recompute_error(self) -> float:
        return self.simulated_recompute_ms / self.published_recompute_ms - 1

    @property
    def pull_error(self) -> float:
        return self.simulated_pull_ms / self.published_pull_ms - 1


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """So many streams on one endpoint; milliseconds between tokens. `simulated_ms` is the model's, `alone_ms`
    without what the published fleets' stack adds to a step, which the published figure does not have."""

    streams: int
    context_tokens: int
    published_ms: float
    alone_ms: float
    simulated_ms: float

    @property
    def error(self) -> float:
        return self.alone_ms / self.published_ms - 1


def decode_table(model: CalibratedModel) -> list[DecodeRow]:
    """A row for each published point; none: the model's decode times are assumed."""
    stack_ms = sum(v.value for v in model.values if v.name == STACK)
    rows = []
    for point in model.decode_points:
        step_ms = model.profile.timing.step_ms((), [point.context_tokens] * point.streams)
        rows.append(
            DecodeRow(point.streams, point.context_tokens, point.token_ms, step_ms - stack_ms, step_ms)
        )
    return rows


def crossover_table(model: CalibratedModel, link_bytes_per_s: float = 50e9) -> list[CrossoverRow]:
    """A row for each published point."""
    rows = []
    for point in model.points:
        # recompute: a prompt of exactly the prefix; pull: the prefix and a tail that is computed
        recompute_ms = measure_ms(model.profile, point.prefix_tokens, 0, False, link_bytes_per_s)
        pull_ms = measure_ms(model.profile, point.prefix_tokens, TAIL_TOKENS, True, link_bytes_per_s)
        rows.append(
            CrossoverRow(point.prefix_tokens, point.recompute_ms, recompute_ms, point.pull_ms, pull_ms)
        )
    return rows


def measure_ms(
    profile: ModelProfile, prefix_tokens: int, tail_tokens: int, pulls: bool, link_bytes_per_s: float
) -> float:
    """Time to the first token on a cold endpoint whose peer has just computed the prompt."""
    timeline = Timeline()
    transfers = Pulls(timeline, FairNetwork(link_bytes_per_s), PullLimits(base_s=60.0, max_s=60.0))
    holder = SimulatedEngine("holder", _SHAPE, profile, timeline, pull=_nothing, publish=_nothing)

    def pull(request: EngineRequest, first: int) -> None:
        transfers.begin(holder, cold, request, first)

    cold = SimulatedEngine("cold", _SHAPE, profile, timeline, pull=pull, publish=_nothing)
    transfers.warm([("holder", "cold")])
    tokens = random_tokens(random.Random(prefix_tokens), prefix_tokens + tail_tokens)
    content = Content.of(tokens, _SHAPE.block_tokens)
    _run(timeline, holder, content, None)
    record = _run(timeline, cold, content, holder.name if pulls else None)
    assert record.ttft_s is not None
    if pulls and record.pulled_tokens < prefix_tokens - _SHAPE.block_tokens:
        raise AssertionError("a pull was priced that did not move the prefix")
    return record.ttft_s * 1e3


def _nothing(*_: object) -> None:
    return None


def _run(timeline: Timeline, engine: SimulatedEngine, content: Content, source: str | None) -> Record:
    record = Record(engine.name, "", timeline.now_s, len(content.tokens), 1)

    def first_token(_: EngineRequest) -> None:
        record.first_token_s = timeline.now_s

    engine.submit(
        EngineRequest(record, content, len(content.tokens), 1, first_token, lambda *_: None, source=source)
    )
    timeline.run()
    return record
