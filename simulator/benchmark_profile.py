"""Workload profiles of llm-d-benchmark as clients: `shared_prefix` at given rates, `conversation_replay`.

Only what shapes the traffic is read; placeholders of the harness (models, URLs) are of no interest here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from sidecar.yaml_text import YamlTextError, load_yaml
from simulator.clients import Conversations, RateStages, Script, Stage, Turn
from simulator.fleet import Fleet
from simulator.prompts import random_tokens

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Draw:
    """A distribution of a profile: lognormal about `mean`, cut to [low, high]."""

    low: float
    high: float
    mean: float
    deviation: float

    def __call__(self, rng: random.Random) -> float:
        if self.low >= self.high or self.deviation <= 0 or self.mean <= 0:
            return min(max(self.mean, self.low), self.high)
        spread = math.log1p((self.deviation / self.mean) ** 2)
        value = rng.lognormvariate(math.log(self.mean) - spread / 2, math.sqrt(spread))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class ReplayedConversations:
    """`conversation_replay` under `concurrent` load, its stages one after the other."""

    concurrencies: tuple[int, ...]
    conversations: int
    system_tokens: int
    opening: Draw
    turns: Draw
    question: Draw
    answer: Draw
    pause_s: Draw
    timeout_s: float | None
    max_tokens: int

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        rng = random.Random(f"profile {seed}")
        system = random_tokens(rng, self.system_tokens)
        scripts = [self._script(rng, system) for _ in range(self.conversations)]
        stages = []
        for concurrency in self.concurrencies:
            clients = Conversations(concurrency, 0.02, (f"concurrency {concurrency}",), self.timeout_s)
            stages += clients.run(fleet, scripts, seed)
        return stages

    def _script(self, rng: random.Random, system: Any) -> Script:
        opening = system + random_tokens(rng, round(self.opening(rng)))
        left = self.max_tokens - len(opening)
        turns = []
        for number in range(max(1, round(self.turns(rng)))):
            question, answer = max(1, round(self.question(rng))), max(1, round(self.answer(rng)))
            left -= question + answer
            if left < 0:
                break
            turns.append(Turn(question, answer, self.pause_s(rng) if number else 0.0))
        return Script(opening, tuple(turns) or (Turn(1, 1),))


def read_profile(path: Path) -> RateStages | ReplayedConversations:
    """Raises ConfigError for a profile of another kind, or one that lacks something."""
    try:
        raw = load_yaml(path.read_text(), max_bytes=MAX_FILE_BYTES)
    except (YamlTextError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error
    data, load = _part(path, raw, "data"), _part(path, raw, "load")
    kind = data.get("type")
    if kind == "shared_prefix":
        return _shared_prefix(path, _part(path, data, "shared_prefix"), load)
    if kind == "conversation_replay":
        return _conversations(path, _part(path, data, "conversation_replay"), load)
    if kind == "weka_trace_replay":
        raise ConfigError(
            f"{path}: it only names a data set; give its session files (a directory) as the trace"
        )
    raise ConfigError(f"{path}: data.type {kind!r}: known are shared_prefix and conversation_replay")


def _shared_prefix(path: Path, data: Mapping[str, Any], load: Mapping[str, Any]) -> RateStages:
    stages = _stages(path, load)
    rates = tuple(_number(path, stage, "rate") for stage in stages)
    return RateStages(
        prefixes=int(_number(path, data, "num_groups")),
        prefix_tokens=int(_number(path, data, "system_prompt_len")),
        question_tokens=int(_number(path, data, "question_len")),
        output_tokens=int(_number(path, data, "output_len")),
        rates_per_s=rates,
        stage_s=tuple(_number(path, stage, "duration") for stage in stages),
        timeout_s=load.get("request_timeout"),
        counted=load.get("type") == "constant",
        dealt=True,
    )


def _conversations(path: Path, data: Mapping[str, Any], load: Mapping[str, Any]) -> ReplayedConversations:
    return ReplayedConversations(
        concurrencies=tuple(int(_number(path, s, "concurrency_level")) for s in _stages(path, load)),
        conversations=int(_number(path, data, "num_conversations")),
        system_tokens=int(_number(path, data, "shared_system_prompt_len")),
        opening=_draw(path, data, "dynamic_system_prompt_len"),
        turns=_draw(path, data, "turns_per_conversation"),
        question=_draw(path, data, "input_tokens_per_turn"),
        answer=_draw(path, data, "output_tokens_per_turn"),
        pause_s=_draw(path, data, "tool_call_latency_sec"),
        timeout_s=load.get("request_timeout"),
        max_tokens=int(_number(path, data, "max_model_len")),
    )


def _stages(path: Path, load: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    stages = load.get("stages")
    if not isinstance(stages, list) or not stages or not all(isinstance(s, Mapping) for s in stages):
        raise ConfigError(f"{path}: load.stages: expected a list of stages")
    return stages


def _draw(path: Path, data: Mapping[str, Any], name: str) -> Draw:
    part = _part(path, data, name)
    low, high, mean = (_number(path, part, key) for key in ("min", "max", "mean"))
    return Draw(low, high, mean, float(part.get("std_dev", 0.0)))


def _part(path: Path, raw: Any, name: str) -> Mapping[str, Any]:
    part = raw.get(name) if isinstance(raw, Mapping) else None
    if not isinstance(part, Mapping):
        raise ConfigError(f"{path}: {name} is missing")
    return part


def _number(path: Path, raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {name}: expected a number")
    return float(value)
