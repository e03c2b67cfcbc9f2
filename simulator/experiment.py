"""An experiment as committed: fleet, clients, arms, protocol, and what was published. Read and refused here.

The protocol is part of the file, so that it is fixed before the experiment runs. Figures come from `run_job`,
one arm and one seed at a time, so that jobs can run on many cores and still give the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from epp.config import EppConfig, parse_config
from epp.core.errors import ConfigError
from epp.core.thresholds import PullSettings
from epp.engine_model.profile import ModelProfile
from simulator.calibration import DATA, load_model
from simulator.clients import Conversations, RateStages, Script, SharedPrefix, Size, Stage, Turn, draw
from simulator.engine import EngineShape
from simulator.fleet import Fleet, FleetShape
from simulator.incidents import Join, Memory, PickerRestart, Restart
from simulator.prompts import random_tokens
from simulator.summary import summarise
from simulator.what_if import AS_CONFIGURED, settings_of

NEWCOMER = "newcomer"  # the stage of figures about engines that joined
Figures = dict[str, dict[str, float]]  # stage -> figure -> value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FleetSpec(_Strict):
    """Sizes in tokens, times in seconds."""

    engines: int = Field(ge=1)
    roles: dict[str, int] = Field(default_factory=dict)
    block_tokens: int = Field(default=64, ge=1)
    device_tokens: int = Field(default=1_000_000, ge=1)
    cpu_tokens: int = Field(default=2_000_000, ge=1)
    max_running: int = Field(default=256, ge=1)
    preempts: bool = False
    link_bytes_per_s: float = Field(default=50e9, gt=0)
    scrape_s: float = Field(default=0.05, gt=0)
    event_delay_s: float = Field(default=0.1, ge=0)
    gateway_s: float = Field(default=0.05, ge=0)
    warm_sessions: bool = True
    keeps_connected: bool = False
    ranks_per_instance: int = Field(default=1, ge=1)  # expert-parallel: their steps are one
    primed: bool = False  # every engine has answered one short prompt before

    def shape(self) -> FleetShape:
        engine = EngineShape(
            self.block_tokens, self.device_tokens, self.cpu_tokens, self.max_running, preempts=self.preempts
        )
        return FleetShape(
            engines=self.engines,
            shape=engine,
            roles=self.roles,
            link_bytes_per_s=self.link_bytes_per_s,
            scrape_s=self.scrape_s,
            event_delay_s=self.event_delay_s,
            gateway_s=self.gateway_s,
            warm_sessions=self.warm_sessions,
            keeps_connected=self.keeps_connected,
            ranks_per_instance=self.ranks_per_instance,
        )


class RatesSpec(_Strict):
    """See `clients.RateStages`."""

    kind: Literal["rates"]
    prefixes: int
    prefix_tokens: Size
    question_tokens: int
    output_tokens: int
    rates_per_s: tuple[float, ...]
    stage_s: float
    warm_up_rate_per_s: float = 0.0
    warm_up_s: float = 0.0
    zipf: tuple[float, ...] = (0.0,)
    timeout_s: float | None = None
    counted: bool = False
    dealt: bool = False

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        return RateStages(**self.model_dump(exclude={"kind"})).run(fleet, seed)


class DocumentsSpec(_Strict):
    """Conversations about one private document each, after a shared system prompt."""

    kind: Literal["documents"]
    documents: int
    document_tokens: int
    system_tokens: int
    turns: int
    question_tokens: int
    output_tokens: int
    think_s: tuple[float, float]
    concurrency: int
    burst_s: float
    timeout_s: float | None = None
    runs: tuple[str, ...] = ("cold", "warm")

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        rng = random.Random(f"documents {seed}")
        system = random_tokens(rng, self.system_tokens)
        scripts = []
        for _ in range(self.documents):
            opening = system + random_tokens(rng, self.document_tokens)
            turns = [
                Turn(self.question_tokens, self.output_tokens, rng.uniform(*self.think_s) if n else 0.0)
                for n in range(self.turns)
            ]
            scripts.append(Script(opening, tuple(turns)))
        clients = Conversations(self.concurrency, self.burst_s, self.runs, self.timeout_s)
        return clients.run(fleet, scripts, seed)


class SessionsSpec(_Strict):
    """Sessions of so many turns, each adding a question and an answer. Sizes: a number, or [median, mean,
    low, high] of a lognormal cut to [low, high]; a session ends before it has `max_tokens`."""

    kind: Literal["sessions"]
    conversations: int
    concurrency: int
    opening_tokens: Size
    turns: tuple[int, int]
    question_tokens: Size
    output_tokens: Size
    think_s: tuple[float, float]
    burst_s: float
    max_tokens: int = 1 << 20
    timeout_s: float | None = None
    retry_s: float | None = None
    window_s: float | None = None

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        rng = random.Random(f"sessions {seed}")
        scripts = []
        for _ in range(self.conversations):
            opening = draw(rng, self.opening_tokens)
            left = self.max_tokens - opening
            turns: list[Turn] = []
            for number in range(rng.randint(*self.turns)):
                question, answer = draw(rng, self.question_tokens), draw(rng, self.output_tokens)
                left -= question + answer
                if left < 0 and turns:
                    break
                turns.append(Turn(question, answer, rng.uniform(*self.think_s) if number else 0.0))
            scripts.append(Script(random_tokens(rng, opening), tuple(turns)))
        clients = Conversations(
            self.concurrency, self.burst_s, ("sessions",), self.timeout_s, self.retry_s, self.window_s
        )
        return clients.run(fleet, scripts, seed)


class SharedPrefixSpec(_Strict):
    """See `clients.SharedPrefix`."""

    kind: Literal["shared"]
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    warm_ups: int
    requests: int
    concurrency: int
    burst_s: float

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        return SharedPrefix(**self.model_dump(exclude={"kind"})).run(fleet, seed)


Client = Annotated[RatesSpec | DocumentsSpec | SessionsSpec | SharedPrefixSpec, Field(discriminator="kind")]


class Published(_Strict):
    """One published figure of a fleet. Never an input of anything simulated."""

    arm: str
    stage: str
    figure: str
    value: float
    used_for: str = ""  # what of the protocol was chosen by it: then it is no prediction


class Ratio(_Strict):
    """A published ratio of two arms, with its name in the tables; `required`: to be met within 20%."""

    of: str
    over: str
    stage: str
    figure: str
    required: bool = False


class Arm(_Strict):
    """A policy file, and how it is used here: `pulls` as an arm of the what-if is named (`no pulls`,
    `threshold 4,096`, `cost mode`), `memory` of a restarted picker."""

    policy: str
    pulls: str = AS_CONFIGURED
    memory: Memory = "snapshot"


class Experiment(_Strict):
    """One file of `data/experiments`."""

    title: str
    source: str
    protocol: str
    model: str
    model_changes: dict[str, float] = Field(default_factory=dict)  # of its timing or transfer
    fleet: FleetSpec
    client: Client
    arms: dict[str, Arm]  # a policy file alone may be given by its name
    seeds: int = Field(ge=1)
    restart: Restart | None = None
    picker_restart: PickerRestart | None = None
    join: Join | None = None
    windows: dict[str, tuple[float, float]] = Field(default_factory=dict)  # figures by time of sending
    published: tuple[Published, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    variants: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)

    @field_validator("arms", mode="before")
    @classmethod
    def _named(cls, arms: dict[str, Any]) -> dict[str, Any]:
        return {n: {"policy": arm} if isinstance(arm, str) else arm for n, arm in arms.items()}

    def varied(self, changes: Mapping[str, Mapping[str, Any]]) -> Experiment:
        """The same with other `fleet` and `client` values (those of `model` are not part of it)."""
        raw = self.model_dump()
        for part in ("fleet", "client"):
            raw[part] |= dict(changes.get(part, {}))
        return Experiment.model_validate(raw)


def experiment_names() -> list[str]:
    return sorted(path.stem for path in (DATA / "experiments").glob("*.json"))


def load_experiment(name: str) -> Experiment:
    """Raises ConfigError for a name without a file, or a file with a mistake."""
    path = DATA / "experiments" / f"{name}.json"
    if not path.exists():
        raise ConfigError(f"no experiment {name!r}; there are {', '.join(experiment_names())}")
    return read_experiment(path)


def read_experiment(path: Path) -> Experiment:
    """Raises ConfigError, naming the place."""
    try:
        return Experiment.model_validate(json.loads(path.read_text()))
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def load_policy(name: str) -> EppConfig:
    """One of the committed EndpointPickerConfigs, by the product's own reader."""
    path = DATA / "policies" / f"{name}.yaml"
    return parse_config(path.read_text(), str(path))


def varied_profile(profile: ModelProfile, changes: Mapping[str, float]) -> ModelProfile:
    """A profile with other values of its timing or transfer."""
    transfer = {n: v for n, v in changes.items() if n in type(profile.transfer).__slots__}
    timing: dict[str, Any] = {n: v for n, v in changes.items() if n in type(profile.timing).__slots__}
    if unknown := changes.keys() - transfer.keys() - timing.keys():
        raise ConfigError(f"a model has no {', '.join(sorted(unknown))}")
    return replace(
        profile,
        timing=replace(profile.timing, **timing),
        transfer=replace(profile.transfer, **transfer),
    )


def run_job(
    experiment: Experiment,
    arm: str,
    seed: int,
    variant: str = "",
    thresholds: PullSettings | None = None,
) -> Figures:
    """One arm under one seed: figures of each stage."""
    fleet, stages = run_fleet(experiment, arm, seed, variant, thresholds)
    figures = {stage.name: summarise(stage) for stage in stages}
    if experiment.join is not None:
        figures[NEWCOMER] = experiment.join.figures(fleet.records, experiment.fleet.engines)
    for stage_figures in figures.values():
        stage_figures["events"] = float(fleet.timeline.done)
    return figures


def run_fleet(
    experiment: Experiment,
    arm: str,
    seed: int,
    variant: str = "",
    thresholds: PullSettings | None = None,
) -> tuple[Fleet, list[Stage]]:
    """The same, with everything that happened."""
    changes = experiment.variants[variant] if variant else {}
    wanted = experiment.varied(changes)
    profile = load_model(experiment.model).profile
    profile = varied_profile(profile, experiment.model_changes | changes.get("model", {}))
    chosen = wanted.arms[arm]
    settings = thresholds or settings_of(chosen.pulls, profile)
    fleet = Fleet(wanted.fleet.shape(), profile, load_policy(chosen.policy), settings, seed)
    if wanted.fleet.primed:
        fleet.prime()
    if wanted.restart is not None:
        wanted.restart.begin(fleet)
    if wanted.picker_restart is not None:
        wanted.picker_restart.begin(fleet, chosen.memory)
    if wanted.join is not None:
        wanted.join.begin(fleet)
    stages = wanted.client.run(fleet, seed)
    return fleet, [part for stage in stages for part in _parts(stage, wanted.windows)]


def _parts(stage: Stage, windows: Mapping[str, tuple[float, float]]) -> list[Stage]:
    """A stage, or its requests by when they were sent."""
    if not windows:
        return [stage]
    parts = []
    for name, (begin_s, end_s) in windows.items():
        sent = [r for r in stage.records if begin_s <= r.sent_s - stage.began_s < end_s]
        parts.append(Stage(name, stage.began_s + begin_s, sent))
    return parts
