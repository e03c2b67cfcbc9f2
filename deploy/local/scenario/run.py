"""The whole scenario, in the order in which each row finds what it needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deploy.local.fleet import Fleet
from deploy.local.report import Reporter
from deploy.local.scenario import balance, disagg, faults, locality, mismatch, pulls, warm_up
from deploy.local.scenario.row import Check, Row
from deploy.local.scenario.texts import Texts
from deploy.local.scenario.world import World

ROWS = 12


@dataclass(frozen=True, slots=True)
class Result:
    """Rows by number, the extra checks, and the numbers of the rows that there must be."""

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    wanted: tuple[int, ...] = tuple(range(1, ROWS + 1))

    @property
    def as_expected(self) -> bool:
        """Every row is there and nothing came out otherwise."""
        numbers = [row.number for row in self.rows]
        wrong = any(row.problems for row in self.rows) or any(check.problems for check in self.checks)
        return numbers == list(self.wanted) and not wrong


async def run_scenario(fleet: Fleet, report: Reporter, *, judge_ttft: bool) -> Result:
    """Run all rows on a fleet that has just started.

    Raises:
        FleetError: a precondition did not come true, or a part failed.
    """
    world = World(fleet, Texts(fleet.spec.tokenizer), report, judge_ttft)
    cold, _ = await asyncio.gather(locality.cold_prefix(world), warm_up.touch_memory(world))
    rows = [cold, await locality.owner_idle(world)]
    await pulls.own_small_document(world)
    await warm_up.open_sessions(world)
    rows += await pulls.owner_busy(world)
    checks = [await locality.equal_holders(world)]
    rows.append(await locality.evicted_device_tier(world))
    rows.append(await balance.two_holders(world))
    await disagg.switch_picker(world)
    later_turns, _ = await asyncio.gather(disagg.later_turns(world), mismatch.start_stranger(world))
    rows += later_turns
    checks.append(await mismatch.wrong_hash_seed(world))
    rows.append(await faults.restarted_picker(world))
    rows.append(await faults.source_killed(world))  # last: a peer's sudden death is felt for seconds
    return Result(tuple(sorted(rows, key=lambda row: row.number)), tuple(checks))
