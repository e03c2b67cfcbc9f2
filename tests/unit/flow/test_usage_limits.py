"""Ceilings by priority: who waits before the pool is full, and who does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epp.config import parse_config
from epp.core.errors import ConfigError
from epp.core.flow.bands import BandSettings, FlowSettings
from epp.core.flow.usage_limits import (
    ActivePriorities,
    HoldbackByRank,
    HoldbackByTable,
    HoldbackByValue,
    SoftReflectiveCeiling,
    UsageLimit,
)
from epp.flow.admission import Asking
from epp.flow.controller import FlowController


@pytest.mark.parametrize(
    ("limit", "priorities", "ceilings"),
    [
        (HoldbackByRank(0.4, 0.9), [10, 0, -10], [0.9, 0.65, 0.4]),
        (HoldbackByRank(0.4, 0.9), [100, 99, 1], [0.9, 0.65, 0.4]),
        (HoldbackByRank(0.4, 0.9), [-5], [0.9]),  # nobody to hold it back for
        (HoldbackByValue(0.4, 0.9), [10, 5, 0], [0.9, 0.65, 0.4]),
        (HoldbackByValue(0.0), [100, 99, 0], [1.0, 0.99, 0.0]),
        (HoldbackByValue(0.4, 0.9), [7], [0.9]),
        (HoldbackByTable({10: 1.0, 0: 0.8}), [10, 0, -5], [1.0, 0.8, 0.0]),
        (HoldbackByRank(0.4), [], []),
        (HoldbackByValue(0.4), [], []),
    ],
)
def test_holdback_by_rank_value_and_table(
    limit: UsageLimit, priorities: list[int], ceilings: list[float]
) -> None:
    for saturation in (0.0, 0.5, 2.0):
        assert limit.ceilings(saturation, priorities, 1) == pytest.approx(ceilings)


@pytest.mark.parametrize(
    ("saturation", "mid", "low"),
    # turns in twelve in which a priority is served; the reflective ceilings are 1 - s/2 and 1 - s
    [(0.0, 12, 12), (0.49, 12, 12), (0.55, 12, 12), (0.66, 12, 6), (0.75, 4, 4), (0.8, 3, 3), (1.0, 0, 0)],
)
def test_the_soft_ceiling_serves_lower_priorities_ever_more_seldom(
    saturation: float, mid: int, low: int
) -> None:
    rows = [SoftReflectiveCeiling().ceilings(saturation, [2, 1, 0], turn) for turn in range(1, 13)]
    assert [sum(saturation < row[rank] for row in rows) for rank in (1, 2)] == [mid, low]
    assert all(row[0] == 1.0 for row in rows), "the highest is never gated"


def test_a_priority_counts_while_it_is_configured_or_was_asked_for_lately() -> None:
    active = ActivePriorities(frozenset({10, 0}))
    for now_s, priority in ((0.0, -5), (1.0, 3), (1.0, 10)):
        active.note(priority, now_s)
    assert active.descending(600.0) == [10, 3, 0, -5]
    assert active.descending(600.5) == [10, 3, 0]
    assert active.descending(10_000.0) == [10, 0]


class Pool:
    def __init__(self, limit: UsageLimit | None, *priorities: int) -> None:
        bands = {priority: BandSettings() for priority in priorities}
        self.level = 0.0
        settings = FlowSettings(bands=bands, usage_limit=limit)
        self.controller = FlowController(settings, lambda now_s, unbooked: self.level, clock=lambda: 0.0)

    async def enters(self, priority: int) -> bool:
        """Whether such a request is let in at this level; one that is not leaves."""
        asking = asyncio.create_task(self._enter(priority))
        for _ in range(5):
            await asyncio.sleep(0)
        entered = asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len(self.controller.queue) == self.controller.unbooked == 0
        return entered

    async def _enter(self, priority: int) -> None:
        async with self.controller.admitted(Asking(priority)):
            pass


@pytest.mark.parametrize("level", [0.3, 0.5, 0.7, 0.95])
async def test_the_lower_a_priority_the_earlier_it_waits(level: float) -> None:
    pool = Pool(HoldbackByRank(0.4, 0.9), 10, 0, -10)
    pool.level = level
    found = [await pool.enters(priority) for priority in (10, 0, -10)]
    assert found == [level < ceiling for ceiling in (0.9, 0.65, 0.4)]
    assert [pool.controller.enters_at_once(Asking(priority)) for priority in (10, 0, -10)] == found


async def test_without_a_policy_everybody_enters_until_the_pool_is_full() -> None:
    """The negative control: the same levels."""
    pool = Pool(None, 10, 0, -10)
    pool.level = 0.95
    assert [await pool.enters(priority) for priority in (10, 0, -10)] == [True] * 3
    pool.level = 1.0
    assert [await pool.enters(priority) for priority in (10, 0, -10)] == [False] * 3


async def test_who_waits_below_its_ceiling_is_passed_by_a_higher_priority_and_served_later() -> None:
    pool = Pool(HoldbackByRank(0.4), 10, -10)
    pool.level = 0.6
    low = asyncio.create_task(pool._enter(-10))
    await asyncio.sleep(0)
    assert len(pool.controller.queue) == 1
    await asyncio.wait_for(pool._enter(10), 5)
    assert not low.done(), "the higher one went first although it came later"
    pool.level = 0.39
    pool.controller.wake()
    await asyncio.wait_for(low, 5)


async def test_the_soft_ceiling_lets_a_lower_priority_in_now_and_then() -> None:
    pool = Pool(SoftReflectiveCeiling(), 1, 0)
    pool.level = 0.75  # one turn in three
    asked = [pool.controller.enters_at_once(Asking(0)) for _ in range(30)]
    assert sum(asked) == 10
    pool.level = 1.0
    assert not any(pool.controller.enters_at_once(Asking(0)) for _ in range(30))


CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: queue-scorer}}
- {{type: priority-holdback-policy, parameters: {parameters}}}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
flowControl: {{usageLimitPolicyPluginRef: priority-holdback-policy}}
"""


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ("{minCeiling: 0.4, maxCeiling: 0.9}", HoldbackByRank(0.4, 0.9)),
        ("{shape: linear, domain: rank, minCeiling: 0.0}", HoldbackByRank(0.0, 1.0)),
        ("{domain: value, minCeiling: 0.25}", HoldbackByValue(0.25, 1.0)),
        ('{domain: explicit, ceilings: {"10": 1.0, "-5": 0.5}}', HoldbackByTable({10: 1.0, -5: 0.5})),
        ("{domain: explicit, ceilings: {10: 1.0, -5: 0.5}}", HoldbackByTable({10: 1.0, -5: 0.5})),
    ],
)
def test_a_policy_of_a_configuration_is_the_one_in_force(parameters: str, limit: Any) -> None:
    admission = parse_config(CONFIG.format(parameters=parameters)).admission
    assert admission is not None
    assert admission.flow is not None
    assert (admission.flow.usage_limit, admission.usage_limit) == (limit, 1.0)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ("{}", "minCeiling is required"),
        ("{minCeiling: 0.9, maxCeiling: 0.9}", "minCeiling must be below maxCeiling"),
        ("{minCeiling: 1.0}", "minCeiling"),
        ("{minCeiling: 0.1, maxCeiling: 0.0}", "maxCeiling"),
        ("{minCeiling: 0.1, shape: sigmoid}", "shape"),
        ("{minCeiling: 0.1, domain: rang}", "domain"),
        ("{minCeiling: 0.1, ceilings: {1: 1.0}}", "ceilings is for domain explicit only"),
        ("{domain: explicit}", "domain explicit needs ceilings"),
        ("{domain: explicit, ceilings: {1: 0.5}, minCeiling: 0.1}", "are not for domain explicit"),
        ("{domain: explicit, ceilings: {1: 0.5, 0: 0.6}}", "must not rise"),
        ("{domain: explicit, ceilings: {high: 0.5}}", "expected a priority"),
        ("{domain: explicit, ceilings: {1: 1.5}}", "ceilings"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(parameters: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"plugins\[1\].*" + sentence):
        parse_config(CONFIG.format(parameters=parameters))
