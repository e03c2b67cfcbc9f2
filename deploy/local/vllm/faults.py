"""Rows 7 and 8 on real engines: a picker that has just been restarted, a source that dies in mid pull.

What the emulated engine does when told to (hold its replay, stop in mid pull), a real one does when one of
its processes is stopped: its core answers no replay, its mover writes no block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deploy.local.client import CHAT, Answer
from deploy.local.errors import FleetError
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import (
    Observation,
    Transfer,
    decision_of,
    expect_answered,
    expect_no_transfer,
    expect_pull,
    make_row,
)
from deploy.local.scenario.row import Findings, Row
from deploy.local.vllm.accounts import Page, account, ask, page, wait_up
from deploy.local.vllm.scene import (
    DOCUMENT_TOKENS,
    LOAD,
    LOAD_ANSWER_TOKENS,
    OWNER,
    QUEUE,
    SETTLE_S,
    Scene,
)
from deploy.local.waiting import until
from engine_plugin import wire

CORE: Final = b"VLLM::EngineCore"
MOVER: Final = b"engine_plugin.transport.mover"
_QUIET_REASONS: Final = ("no_claim", "destination_unknown", "no_holder")
_EXTRA_MS: Final = 1_500.0  # row 8: from the source's death to the first token, beyond recomputing


async def restarted_picker(scene: Scene) -> Row:
    """Row 7; with it the picker returns to aggregated serving. The owner's core is stopped meanwhile, so that
    what it holds stays unknown until that has been looked at."""
    fleet, findings = scene.fleet, Findings()
    await scene.hold(OWNER, scene.body("jetty", "What is this?"), "own-jetty", DOCUMENT_TOKENS)
    body = scene.body("jetty", "Is anybody there?")
    with _stopped(fleet.pids[OWNER], CORE):
        await fleet.stop_picker()
        await fleet.start_picker(fleet.spec.picker_config)
        await fleet.wait_live(scene.others)
        asked = scene.others[-1]
        quiet = await ask(fleet, body, "row-07-quiet", client=fleet.lab, headers=scene.steer(asked))
    findings.one_of("reason while its state is unknown", quiet.decision.reason, _QUIET_REASONS)
    findings.equal("destination", quiet.decision.destination, asked)
    expect_no_transfer(findings, quiet)
    expect_answered(findings, quiet)
    await scene.forget(asked)
    await fleet.wait_live(fleet.spec.pods)
    async with busy(fleet, OWNER, waiting=QUEUE, answer_tokens=LOAD_ANSWER_TOKENS, more=LOAD):
        seen = await ask(fleet, scene.body("jetty", "What was written on the sheet?"), "row-07")
    findings.one_of("destination", seen.decision.destination, scene.others)
    expect_pull(findings, seen, OWNER, fleet.spec.kv_bytes_per_token)
    expect_answered(findings, seen)
    expected = f"no source while its replay is held back ({quiet.decision.reason}), after it a pull"
    return scene.done(make_row(7, "picker restarted", seen, expected, findings))


async def source_killed(scene: Scene) -> Row:
    """Row 8. The source's mover is stopped, so that the pull stays in its middle: blocks are leased, the move
    is ordered. Then the whole engine is killed. It comes back with its address, and empty."""
    fleet, findings = scene.fleet, Findings()
    messages = scene.turn("mole", "What is this?")
    first = await scene.own(messages, "own-mole", DOCUMENT_TOKENS)
    before = {pod: await page(fleet, pod) for pod in scene.others}
    async with busy(fleet, OWNER, waiting=QUEUE, answer_tokens=LOAD_ANSWER_TOKENS, more=LOAD):
        os.kill(_process(fleet.pids[OWNER], MOVER), signal.SIGSTOP)
        body = scene.body("mole", "What is this?")
        started_s = time.perf_counter()
        asking = asyncio.create_task(fleet.gateway.stream(CHAT, body, request_id="row-08"))
        try:
            await _until_leased(scene, asking)
            left = _shared_memory(fleet.pids[OWNER])
            await fleet.kill_engine(OWNER)
            for path in left:
                path.unlink(missing_ok=True)
            killed_after_ms = (time.perf_counter() - started_s) * 1e3
            answer = await asking
        finally:
            asking.cancel()
    decision = await decision_of(fleet, "row-08")
    seen = await _seen(scene, answer, decision.destination, before)
    findings.equal("reason", decision.reason, "pull")
    findings.equal("source", decision.source, OWNER)
    findings.equal("the answer is what the source computed", answer.text == first.answer.text, True)
    findings.true(seen.computed.pull_reason not in (None, "ok"), "the pull is reported as complete")
    findings.equal("pulled tokens", seen.computed.pulled_tokens, 0)
    findings.true(seen.computed.computed_tokens >= DOCUMENT_TOKENS, "less than the document was recomputed")
    expect_answered(findings, seen)
    if scene.judge_ttft:
        limit_ms = scene.recompute_ttft_ms + _EXTRA_MS
        waited_ms = answer.ttft_ms - killed_after_ms
        findings.between("ms from the kill to the first token", round(waited_ms), 0, round(limit_ms))
    await fleet.start_engine(OWNER)
    await wait_up(fleet)
    await fleet.wait_live(fleet.spec.pods)
    expected = (
        f"the source dies in mid pull ({seen.computed.pull_reason}): recomputed, the source's own answer"
    )
    return scene.done(make_row(8, "source killed", seen, expected, findings))


async def _until_leased(scene: Scene, asking: asyncio.Task[Answer]) -> None:
    """Until the source holds blocks for the pull, while the request still waits."""
    await until(
        f"{OWNER} has leased blocks to a pull that does not end",
        lambda: page(scene.fleet, OWNER),
        lambda now: now.totals[wire.LEASES] > 0 or asking.done(),
        timeout_s=SETTLE_S,
    )
    if asking.done():
        raise FleetError("row 8 was answered before its source could be killed")


async def _seen(scene: Scene, answer: Answer, pod: str, before: dict[str, Page]) -> Observation:
    """What the one who computed says; the source is dead and counts nothing."""

    async def look() -> Page:
        return await page(scene.fleet, pod)

    after = await until(
        f"{pod} has counted the prompt and the pull",
        look,
        lambda now: (
            account(before[pod], now, 0).prompt_tokens >= answer.prompt_tokens
            and account(before[pod], now, 0).pull_reason is not None
        ),
        timeout_s=SETTLE_S,
    )
    received = (
        after.totals[wire.PULL_RECEIVED_BYTES_TOTAL] - before[pod].totals[wire.PULL_RECEIVED_BYTES_TOTAL]
    )
    told = account(before[pod], after, received)
    decision = await decision_of(scene.fleet, answer.request_id)
    return Observation(answer, decision, told, told, Transfer({pod: received}, {}))


@contextlib.contextmanager
def _stopped(group: int, title: bytes) -> Iterator[None]:
    """One process of an engine does nothing inside the block."""
    pid = _process(group, title)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _process(group: int, title: bytes) -> int:
    """The process of that group whose command line has `title`. Raises FleetError."""
    for entry in _processes(group):
        with contextlib.suppress(OSError):
            if title in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise FleetError(f"no process of group {group} is a {title.decode()}")


def _shared_memory(group: int) -> set[Path]:
    """vLLM's own files in /dev/shm, which a killed one leaves behind; the CPU tier's has no name."""
    found = set()
    for entry in _processes(group):
        with contextlib.suppress(OSError):
            words = (entry / "maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith(("/dev/shm/psm_", "/dev/shm/sem.mp-"))}
    return found


def _processes(group: int) -> Iterator[Path]:
    """Directories in /proc of the processes of that group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    yield entry
