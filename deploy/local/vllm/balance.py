"""Row 9 on real engines: two equal holders, one with a deeper queue; sources follow 1/(1+waiting).

Fewer requests than the emulated fleet's row, one at a time: a second one would make the destination look
busy, and its account would not be one request's.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

from deploy.local.client import CHAT
from deploy.local.scenario.balance import Tally, expect_delivered, judge, row
from deploy.local.scenario.load import busy
from deploy.local.scenario.row import Findings, Row
from deploy.local.scenario.texts import chat, question
from deploy.local.vllm.accounts import ask, pages, transfer
from deploy.local.vllm.scene import LOAD, LOAD_ANSWER_TOKENS, OWNER, Scene

PODS_NEEDED: Final = 3
REQUESTS: Final = 48
_DOCUMENTS: Final = 6
_PREFIX_TOKENS: Final = 2304  # above the minimum gain of 2,048
_DEEP_QUEUE: Final = 14
_SHORT_QUEUE: Final = 9  # deep enough that its holder is not chosen to compute, which has the prefix
# a source is sampled by the request id: fixed ids repeat the outcome, and uuids spread as a client's do
_IDS: Final = uuid.UUID("0b8f0f52-64a5-4f0e-8a0e-2f1f6f4f6d11")


async def two_holders(scene: Scene) -> Row:
    """Row 9. The third endpoint asks about each prefix in turn, and is emptied after each round."""
    fleet, findings = scene.fleet, Findings()
    holders, destination = (OWNER, scene.others[0]), scene.others[1]
    prefixes = [scene.texts.document(f"shared {n}", _PREFIX_TOKENS) for n in range(_DOCUMENTS)]
    await asyncio.gather(*(_hold(scene, pod, prefixes) for pod in holders))
    await scene.forget(destination)
    tally = Tally(fleet.spec.kv_bytes_per_token)
    before = await pages(fleet)
    async with (
        busy(fleet, holders[0], waiting=_DEEP_QUEUE, answer_tokens=LOAD_ANSWER_TOKENS, more=LOAD),
        busy(fleet, holders[1], waiting=_SHORT_QUEUE, answer_tokens=LOAD_ANSWER_TOKENS, more=LOAD),
    ):
        for first in range(0, REQUESTS, len(prefixes)):
            for number, prefix in enumerate(prefixes, first):
                await _one(scene, number, prefix, destination, tally, findings)
            await scene.forget(destination)
    moved = transfer(before, await pages(fleet))
    judge(tally, moved, holders, destination, REQUESTS, findings)
    return scene.done(row(tally, moved, destination, REQUESTS, findings))


async def _hold(scene: Scene, pod: str, prefixes: list[str]) -> None:
    """Let `pod` compute every prefix, asked on its own port."""
    client = scene.fleet.engine_client(pod)
    before = (await scene.fleet.picker.endpoints())[pod].blocks_cpu
    for number, prefix in enumerate(prefixes):
        body = chat([question(prefix, "What is this?")], max_tokens=2)
        await client.stream(CHAT, body, request_id=f"hold-{pod}-{number}")
    await scene.until_known(pod, before + len(prefixes) * _PREFIX_TOKENS // scene.block_size)


async def _one(
    scene: Scene, number: int, prefix: str, destination: str, tally: Tally, findings: Findings
) -> None:
    request_id = str(uuid.uuid5(_IDS, str(number)))
    body = chat([question(prefix, f"What is number {number}?")], max_tokens=1)
    seen = await ask(scene.fleet, body, request_id)
    findings.equal(f"destination of {request_id}", seen.decision.destination, destination)
    expect_delivered(findings, request_id, seen.computed, seen.decision)
    tally.add(seen.answer, seen.decision, seen.computed)
