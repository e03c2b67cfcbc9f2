"""What happens to a fleet while it serves: engines that die, engines that join, a picker that restarts.

Part of an experiment's protocol, so that it is fixed before the experiment runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from simulator.fleet import Fleet
from simulator.requests import Record

BIN_S = 5.0
_FEWEST = 3  # requests of a bin that says anything
STEADY_SHARE = 0.8

Memory = Literal["snapshot", "replay", "nothing"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Restart(_Strict):
    """A share of the engines dies at once and comes back empty."""

    at_s: float
    share: float = Field(gt=0, le=1)
    down_s: float = Field(ge=0)

    def begin(self, fleet: Fleet) -> None:
        hit = sorted(fleet.engines)[: max(1, round(self.share * len(fleet.engines)))]
        for endpoint_id in hit:
            fleet.timeline.at(self.at_s, fleet.restart, endpoint_id, self.down_s)


class PickerRestart(_Strict):
    """The picker's process dies and is back after `down_s`; requests wait for it. Engines repeat their last
    `replay_batches`. What it begins with is the arm's `memory`."""

    at_s: float
    down_s: float = Field(ge=0)
    replay_batches: int = Field(default=10_000, ge=0)

    def begin(self, fleet: Fleet, memory: Memory) -> None:
        fleet.keep_batches(self.replay_batches)
        fleet.timeline.at(self.at_s, fleet.restart_picker, self.down_s, memory)


class Join(_Strict):
    """Cold engines join the pool."""

    at_s: float
    engines: int = Field(default=1, ge=1)

    def begin(self, fleet: Fleet) -> None:
        first = len(fleet.engines)
        for number in range(first, first + self.engines):
            fleet.timeline.at(self.at_s, _join, fleet, number)

    def figures(self, records: Sequence[Record], old_engines: int) -> dict[str, float]:
        """How the newcomers fared, of requests sent after they joined; see `time_to_reuse_s`."""
        joined_s = self.at_s
        old = {f"engine-{number:04d}" for number in range(old_engines)}
        after = [r for r in records if r.sent_s >= joined_s and not r.failed]
        mine, theirs = [r for r in after if r.computing not in old], [r for r in after if r.computing in old]
        until_s = max((r.sent_s for r in after), default=joined_s)
        steady = STEADY_SHARE * reuse(theirs)
        fair = len(after) * self.engines / (old_engines + self.engines)
        return {
            "join_first_request_s": min((r.sent_s - joined_s for r in mine), default=math.nan),
            "join_share": len(mine) / fair if fair else math.nan,
            "join_time_to_reuse_s": time_to_reuse_s(mine, joined_s, until_s, steady),
            "join_local_time_to_reuse_s": time_to_reuse_s(mine, joined_s, until_s, steady, pulled=False),
            "join_pulled_gib": sum(r.pulled_bytes for r in mine) / 2**30,
        }


def _join(fleet: Fleet, number: int) -> None:
    fleet.connect_ahead(fleet.add_engine(number))


def reuse(records: Sequence[Record], pulled: bool = True) -> float:
    """Share of prompt tokens that were not computed."""
    prompt = sum(r.prompt_tokens for r in records)
    return sum(r.device_hit_tokens + r.restored_tokens + pulled * r.pulled_tokens for r in records) / max(
        1, prompt
    )


def time_to_reuse_s(
    records: Sequence[Record], begin_s: float, until_s: float, wanted: float, pulled: bool = True
) -> float:
    """End of the first bin whose reuse is at least `wanted`, from `begin_s` on. The whole time, if there was
    none: then it is a lower bound. A bin counts if it has three requests."""
    number = 0
    while begin_s + number * BIN_S < until_s:
        low = begin_s + number * BIN_S
        part = [r for r in records if low <= r.sent_s < low + BIN_S]
        if len(part) >= _FEWEST and reuse(part, pulled) >= wanted:
            return (number + 1) * BIN_S
        number += 1
    return until_s - begin_s
