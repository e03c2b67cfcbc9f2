"""Would pulls pay here, and with which threshold? One fleet, one trace, several arms of the user's config.

Arms differ in nothing but the pull thresholds that the product would read from a PullThresholds document: the
configuration as given, pulls off, a ladder of thresholds, and cost mode started from the model's curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from epp.config import EppConfig, parse_config
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.source_selector import SourceProducer
from epp.core.thresholds import MODE_COST, PullSettings
from epp.engine_model.profile import ModelProfile
from simulator.clients import Stage
from simulator.fleet import Fleet, FleetShape
from simulator.summary import Estimate, percentile, summarise

AS_CONFIGURED, NO_PULLS, COST = "as configured", "no pulls", "cost mode"
LADDER_TOKENS = (1024, 2048, 4096, 8192, 16_384)
_EQUAL = 1.02
_QUANTILES = (*range(0, 100, 2), 99, 100)


class Client(Protocol):
    """Whatever sends requests into a fleet."""

    def run(self, fleet: Fleet, seed: int) -> list[Stage]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that a what-if depends on; made of values, so that a job can run in another process."""

    config_text: str
    config_name: str
    shape: FleetShape
    profile: ModelProfile
    client: Client


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm under one seed."""

    figures: Mapping[str, float]  # of all stages together
    ttft_quantiles_s: tuple[float, ...]  # at `quantiles()`
    served: Mapping[str, int]  # requests by computing endpoint
    reasons: Mapping[str, int]  # of the source rule


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm over all seeds."""

    name: str
    figures: Mapping[str, Estimate]
    first: ArmResult

    @property
    def ttft_mean_s(self) -> float:
        return self.figures["ttft_mean_s"].mean


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer in numbers: the best arm that pulls against no pulls."""

    best: str
    threshold_tokens: int | None  # None: cost mode, or as configured
    pays: bool
    sentence: str


def quantiles() -> tuple[int, ...]:
    return _QUANTILES


def arm_names(ladder: Sequence[int] = LADDER_TOKENS) -> list[str]:
    return [AS_CONFIGURED, NO_PULLS, *(f"threshold {tokens:,}" for tokens in ladder), COST]


def settings_of(arm: str, profile: ModelProfile) -> PullSettings | None:
    """What the arm's PullThresholds document would say; None: there is none."""
    if arm == AS_CONFIGURED:
        return None
    if arm == NO_PULLS:
        return PullSettings(enabled=False)
    if arm == COST:
        timing, transfer = profile.timing, profile.transfer
        recompute = RecomputeCurve(timing.chunk_ms, timing.token_us, timing.context_ns / 2)
        token_us = profile.kv_bytes_per_token / transfer.stream_bytes_per_s * 1e6
        pull = PullCurve(
            timing.chunk_ms + transfer.floor_s * 1e3, token_us, profile.kv_bytes_per_token, transfer.session_s
        )
        return PullSettings(
            enabled=True,
            mode=MODE_COST,
            min_cached_token_delta=1024,
            recompute_seed=recompute,
            pull_seed=pull,
        )
    return PullSettings(enabled=True, min_cached_token_delta=threshold_of(arm))


def threshold_of(arm: str) -> int | None:
    return int(arm.removeprefix("threshold ").replace(",", "")) if arm.startswith("threshold ") else None


def run_arm(question: Question, arm: str, seed: int) -> ArmResult:
    """Simulate one arm.

    Raises:
        ConfigError: the configuration is refused by the product's own reader.
    """
    config = parse_config(question.config_text, question.config_name)
    if arm != AS_CONFIGURED:
        config = _able_to_pull(config)
    settings = settings_of(arm, question.profile)
    fleet = Fleet(question.shape, question.profile, config, settings, seed)
    stages = question.client.run(fleet, seed)
    whole = Stage("all", 0.0, [record for stage in stages for record in stage.records])
    ttfts = [r.ttft_s for r in whole.records if r.ttft_s is not None and not r.failed]
    served: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for record in whole.records:
        served[record.computing] = served.get(record.computing, 0) + 1
        reasons[record.reason] = reasons.get(record.reason, 0) + 1
    return ArmResult(
        summarise(whole),
        tuple(percentile(ttfts, q) for q in _QUANTILES),
        dict(sorted(served.items())),
        dict(sorted(reasons.items())),
    )


def _able_to_pull(config: EppConfig) -> EppConfig:
    """With `p2p-source-producer` wired as it would be, where the configuration has none."""
    if config.settings.source_producer is not None:
        return config
    return replace(config, settings=replace(config.settings, source_producer=SourceProducer()))


def collect(name: str, results: Sequence[ArmResult]) -> Arm:
    names = results[0].figures
    return Arm(name, {n: Estimate.of([r.figures[n] for r in results]) for n in names}, results[0])


def verdict(arms: Sequence[Arm]) -> Verdict:
    """Among the arms that move anything, those within 2% of the lowest mean time to the first token are
    equal; of them the configuration as it is comes first, then the highest threshold: it moves least."""
    by_name = {arm.name: arm for arm in arms}
    without = by_name[NO_PULLS]
    pulling = [arm for arm in arms if arm.name != NO_PULLS and arm.figures["pulls"].mean > 0]
    if not pulling:
        return Verdict(NO_PULLS, None, False, "No arm pulled anything: placement leaves no useful source.")
    lowest = min(arm.ttft_mean_s for arm in pulling)
    equal = [arm for arm in pulling if arm.ttft_mean_s <= lowest * _EQUAL]
    best = min(equal, key=lambda arm: (arm.name != AS_CONFIGURED, -(threshold_of(arm.name) or 0), arm.name))
    ours, theirs = best.figures["ttft_mean_s"], without.figures["ttft_mean_s"]
    change = _change(ours.mean, theirs.mean)
    pays = ours.mean * _EQUAL < theirs.mean and ours.mean + ours.half_width < theirs.mean - theirs.half_width
    others = ", ".join(
        f"{label} {_change(best.figures[name].mean, without.figures[name].mean):+.0%}"
        for name, label in (("ttft_p50_s", "p50"), ("ttft_p99_s", "p99"), ("rate_per_s", "requests/s"))
    )
    sentence = (
        f"Best with pulls: {best.name}. Mean time to the first token {theirs.mean:.3f} s -> "
        f"{ours.mean:.3f} s ({change:+.0%}; {others}): {_conclusion(ours, theirs, pays)}."
    )
    return Verdict(best.name, threshold_of(best.name), pays, sentence)


def _change(ours: float, theirs: float) -> float:
    return ours / theirs - 1 if theirs else 0.0


def _conclusion(ours: Estimate, theirs: Estimate, pays: bool) -> str:
    """One seed has no interval, and what is within 2% is equal, whatever its interval."""
    if ours.mean * _EQUAL >= theirs.mean:
        return "no gain is shown, less than 2%" if ours.mean <= theirs.mean else "no gain is shown"
    if ours.seeds < 2:
        return "pulls pay here under this one seed; with --seeds 3 it is known how surely"
    return "clearly pulls pay here" if pays else "the intervals overlap, so no gain is shown"
