"""Rows 7 and 8: a picker that has just been restarted, a source that dies in mid pull."""

from __future__ import annotations

import asyncio
import time

from deploy.local.client import CHAT, Answer
from deploy.local.errors import FleetError
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import (
    Meter,
    Observation,
    account_of,
    ask,
    decision_of,
    expect_answered,
    expect_no_transfer,
    expect_pull,
    make_row,
)
from deploy.local.scenario.row import Findings, Row
from deploy.local.scenario.texts import chat
from deploy.local.scenario.world import ANSWER_TOKENS, OWNER, World
from deploy.local.waiting import until

_QUEUE = 4
_HOLD_AFTER_CHUNKS = 2
_QUIET_REASONS = ("no_claim", "destination_unknown")
_EXTRA_MS = 1_500.0  # row 8: from the source's death to the first token, beyond recomputing


async def restarted_picker(world: World) -> Row:
    """Row 7; with it the picker returns to aggregated serving. Replay is held back, so that the quiet
    phase lasts until it has been looked at."""
    findings = Findings()
    await world.forget(world.others)
    await asyncio.gather(*(engine.faults(hold_replay=True) for engine in world.fleet.engines()))
    await world.fleet.stop_picker()
    await world.fleet.start_picker(world.fleet.spec.picker_config)
    quiet = await ask(world.fleet, world.body("Is anybody there?", small=True), "row-07-quiet")
    findings.one_of("reason while nothing is known", quiet.decision.reason, _QUIET_REASONS)
    expect_no_transfer(findings, quiet)
    expect_answered(findings, quiet)
    await asyncio.gather(*(engine.faults(hold_replay=False) for engine in world.fleet.engines()))
    await world.fleet.wait_live(world.fleet.spec.pods)
    async with busy(world.fleet, OWNER, waiting=_QUEUE):
        seen = await ask(world.fleet, world.body("What was written on the sheet?"), "row-07")
    findings.one_of("destination", seen.decision.destination, world.others)
    expect_pull(findings, seen, OWNER, world.fleet.spec.kv_bytes_per_token)
    expect_answered(findings, seen)
    expected = f"no source while replay is held back ({quiet.decision.reason}), after it a pull"
    return world.finish(make_row(7, "picker restarted", seen, expected, findings))


async def source_killed(world: World) -> Row:
    """Row 8. The source stops in mid pull (a fault holds it there) and is then killed with its mover.

    The prompt is row 1's, so its answer is known. The owner is restarted at once, with empty
    tiers, and the picker has to take it up again.
    """
    findings = Findings()
    await world.forget(world.others)
    meter = Meter(world.fleet, world.others)
    await meter.start()
    async with busy(world.fleet, OWNER, waiting=_QUEUE):
        await world.fleet.engine(OWNER).faults(hold_after_chunks=_HOLD_AFTER_CHUNKS)
        body = chat(world.conversation[:1], max_tokens=ANSWER_TOKENS)
        started_s = time.perf_counter()
        asking = asyncio.create_task(world.fleet.gateway.stream(CHAT, body, request_id="row-08"))
        try:
            await _until_holding(world, asking)
            await world.fleet.kill_engine(OWNER)
            killed_after_ms = (time.perf_counter() - started_s) * 1e3
            answer, _ = await asyncio.gather(asking, world.fleet.start_engine(OWNER))
        finally:
            asking.cancel()
    await world.fleet.wait_live(world.fleet.spec.pods)
    decision = await decision_of(world.fleet, "row-08")
    account = await account_of(world.fleet, decision.destination, "row-08")
    seen = Observation(answer, decision, account, account, await meter.stop())
    findings.equal("reason", decision.reason, "pull")
    findings.equal("source", decision.source, OWNER)
    findings.equal("the answer is row 1's", answer.text == world.first_answer, True)
    findings.true(account.pull_reason not in (None, "ok"), "the pull is reported as complete")
    findings.true(account.computed_tokens > account.prompt_tokens // 2, "less than half was recomputed")
    findings.equal("corrupt blocks", account.corrupt_blocks, 0)
    expect_answered(findings, seen)
    if world.judge_ttft:
        limit_ms = world.recompute_ttft_ms + _EXTRA_MS
        waited_ms = answer.ttft_ms - killed_after_ms
        findings.between("ms from the kill to the first token", round(waited_ms), 0, round(limit_ms))
    expected = f"the source dies in mid pull ({account.pull_reason}): recomputed, same answer as row 1"
    return world.finish(make_row(8, "source killed", seen, expected, findings))


async def _until_holding(world: World, asking: asyncio.Task[Answer]) -> None:
    """Until the source has written some chunks and stopped there, while the request still waits."""
    state = await until(
        f"{OWNER} has stopped in mid pull",
        world.fleet.engine(OWNER).fault_state,
        lambda state: state["holding"] is True or asking.done(),
        timeout_s=10.0,
    )
    if asking.done():
        raise FleetError(f"row 8 was answered before its source stopped in mid pull: {state}")
