"""The scenario on real engines, in the order in which each row finds what it needs.

All twelve rows; with two engines, all but row 9, which needs a third. What a real engine cannot be made to
show here: another hash seed as one more pod (a fourth vLLM on the same cores; the refusal by name is in
`tests/engine/test_pull_failures.py`), and equal holders beyond row 9.
"""

from __future__ import annotations

from typing import Final

from deploy.local.fleet import Fleet
from deploy.local.report import Reporter
from deploy.local.scenario.run import ROWS, Result
from deploy.local.vllm import balance
from deploy.local.vllm.accounts import wait_up
from deploy.local.vllm.faults import restarted_picker, source_killed
from deploy.local.vllm.rows import PlacementRows
from deploy.local.vllm.scene import Scene
from deploy.local.vllm.split import later_turns

_NEEDS_THREE: Final = 9


async def run_on_vllm(fleet: Fleet, report: Reporter, *, judge_ttft: bool) -> Result:
    """Run the rows on a fleet that has just started.

    Raises:
        FleetError: as `run_scenario`.
    """
    scene = Scene(fleet, report, judge_ttft)
    await wait_up(fleet)
    rows, check = await PlacementRows(scene).run()
    wanted = wanted_rows(len(fleet.spec.pods))
    if _NEEDS_THREE in wanted:
        rows.append(await balance.two_holders(scene))
    rows += await later_turns(scene)
    rows.append(await restarted_picker(scene))
    rows.append(await source_killed(scene))  # last: the owner comes back empty
    return Result(tuple(sorted(rows, key=lambda row: row.number)), (check,), wanted)


def wanted_rows(pods: int) -> tuple[int, ...]:
    """The numbers of the rows that a fleet of so many engines shows."""
    numbers = range(1, ROWS + 1)
    return tuple(n for n in numbers if n != _NEEDS_THREE or pods >= balance.PODS_NEEDED)
