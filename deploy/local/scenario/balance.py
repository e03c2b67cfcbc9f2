"""Row 9: two equal holders, one with a deep queue. Sources follow 1/(1+waiting).

Both holders are busy enough that the third endpoint is every request's destination. It asks about
several small documents in turn and is emptied after each round, so that every request has to pull.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import uuid
from collections import Counter

from deploy.local.client import CHAT, Answer
from deploy.local.handles import Decision, RequestAccount
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import Meter, Transfer, account_of, decision_of
from deploy.local.scenario.row import Findings, Row
from deploy.local.scenario.texts import chat, question
from deploy.local.scenario.world import OWNER, World

REQUESTS = 200
_DOCUMENTS = 10
_PREFIX_TOKENS = 2_304  # above the minimum gain of 2,048
_DEEP_QUEUE = 12
_SHORT_QUEUE = 6
_LOAD_ANSWER_TOKENS = 15_000  # reserved at admission: makes the holders' device tiers look full
_AT_ONCE = 3  # requests in flight; more of them would make the destination look busy, too
_SIGMAS = 3.0
# a source is sampled by the request id: fixed ids repeat the outcome, and uuids spread as a client's do
_IDS = uuid.UUID("5c9e2f0a-7a53-4b0c-9d0e-0a4f4f1d2b67")


async def two_holders(world: World) -> Row:
    """Row 9."""
    holders, destination = (OWNER, world.others[0]), world.others[1]
    prefixes = [world.texts.document(f"shared {n}", _PREFIX_TOKENS) for n in range(_DOCUMENTS)]
    await world.forget(world.others)
    await asyncio.gather(*(_hold(world, pod, prefixes) for pod in holders))
    tally = Tally(world.fleet.spec.kv_bytes_per_token)
    findings = Findings()
    meter = Meter(world.fleet, world.fleet.spec.pods)
    async with (
        busy(world.fleet, holders[0], waiting=_DEEP_QUEUE, answer_tokens=_LOAD_ANSWER_TOKENS),
        busy(world.fleet, holders[1], waiting=_SHORT_QUEUE, answer_tokens=_LOAD_ANSWER_TOKENS),
    ):
        await meter.start()
        for first in range(0, REQUESTS, len(prefixes)):
            await _round(world, prefixes, first, destination, tally, findings)
            await world.forget([destination])
        moved = await meter.stop()
    judge(tally, moved, holders, destination, REQUESTS, findings)
    return world.finish(row(tally, moved, destination, REQUESTS, findings))


async def _hold(world: World, pod: str, prefixes: list[str]) -> None:
    """Let `pod` compute every prefix, asked on its own port."""
    client = world.fleet.engine_client(pod)
    before = (await world.fleet.picker.endpoints())[pod].blocks_cpu * world.block_size
    for number, prefix in enumerate(prefixes):
        body = chat([question(prefix, "What is this?")], max_tokens=1)
        await client.stream(CHAT, body, request_id=f"hold-{pod}-{number}")
    await world.until_known(pod, before + len(prefixes) * _PREFIX_TOKENS)


async def _round(
    world: World, prefixes: list[str], first: int, destination: str, tally: Tally, findings: Findings
) -> None:
    """One question about each prefix, a few at a time."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int, prefix: str) -> None:
        request_id = str(uuid.uuid5(_IDS, str(number)))
        body = chat([question(prefix, f"What is number {number}?")], max_tokens=1)
        async with room:
            answer = await world.fleet.gateway.stream(CHAT, body, request_id=request_id)
        decision = await decision_of(world.fleet, request_id)
        findings.equal(f"destination of {request_id}", decision.destination, destination)
        account = await account_of(world.fleet, decision.destination, request_id)
        expect_delivered(findings, request_id, account, decision)
        tally.add(answer, decision, account)

    await asyncio.gather(*(one(number, prefix) for number, prefix in enumerate(prefixes, first)))


def expect_delivered(
    findings: Findings, request_id: str, account: RequestAccount, decision: Decision
) -> None:
    """What the picker promised has come."""
    if account.pulled_tokens != decision.gain_tokens:
        findings.problems.append(
            f"{request_id} pulled {account.pulled_tokens} of {decision.gain_tokens} tokens from"
            f" {decision.source}: {account.pull_reason} {account.pull_detail}"
        )


class Tally:
    """What the requests add up to."""

    def __init__(self, kv_bytes_per_token: int) -> None:
        self._kv_bytes_per_token = kv_bytes_per_token
        self.sources: Counter[str] = Counter()
        self.bytes_by_source: Counter[str] = Counter()
        self.expected: dict[str, float] = {}  # sum of each holder's share, from the recorded queues
        self.variance = 0.0
        self.pulled_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.ttfts_ms: list[float] = []

    def add(self, answer: Answer, decision: Decision, account: RequestAccount) -> None:
        shares = _shares(decision)
        for pod, share in shares.items():
            self.expected[pod] = self.expected.get(pod, 0.0) + share
        self.variance += math.prod(shares.values())
        if decision.source is not None:
            self.sources[decision.source] += 1
            self.bytes_by_source[decision.source] += account.pulled_tokens * self._kv_bytes_per_token
        self.pulled_tokens += account.pulled_tokens
        self.prompt_tokens += account.prompt_tokens
        self.cached_tokens += account.cached_tokens
        self.ttfts_ms.append(answer.ttft_ms)


def _shares(decision: Decision) -> dict[str, float]:
    """Each holder's chance to be named, from the queue that the picker recorded for this decision."""
    waiting = {row["pod"]: row["waiting"] for row in decision.candidates}
    weights = {pod: 1.0 / (1.0 + (waiting[pod] or 0.0)) for pod, _, _ in decision.band}
    total = sum(weights.values())
    return {pod: weight / total for pod, weight in weights.items()}


def judge(
    tally: Tally,
    moved: Transfer,
    holders: tuple[str, str],
    destination: str,
    requests: int,
    findings: Findings,
) -> None:
    """Shares within three sigma of 1/(1+waiting), and every byte accounted for at both ends."""
    findings.equal("requests that named a source", sum(tally.sources.values()), requests)
    findings.equal("holders in the band", sorted(tally.expected), sorted(holders))
    margin = _SIGMAS * math.sqrt(tally.variance)
    for pod in holders:
        expected = tally.expected.get(pod, 0.0)
        findings.between(
            f"requests with source {pod}", tally.sources[pod], expected - margin, expected + margin
        )
        findings.equal(f"bytes served by {pod}", moved.served[pod], tally.bytes_by_source[pod])
    findings.true(
        tally.expected.get(holders[0], 0.0) < tally.expected.get(holders[1], 0.0),
        "the deeper queue did not make a holder less likely",
    )
    findings.equal("bytes received", moved.received[destination], sum(tally.bytes_by_source.values()))


def row(tally: Tally, moved: Transfer, destination: str, requests: int, findings: Findings) -> Row:
    """Row 9 of what the requests add up to."""
    sources = ", ".join(f"{pod} {count}" for pod, count in sorted(tally.sources.items()))
    shares = ", ".join(f"{pod} {count:.0f}" for pod, count in sorted(tally.expected.items()))
    return Row(
        number=9,
        title="two holders, one queued",
        destination=destination,
        prefill="",
        source=sources,
        reason="pull",
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        pulled_tokens=tally.pulled_tokens,
        bytes_received=moved.received_bytes,
        bytes_served=moved.served_bytes,
        ttft_ms=round(statistics.median(tally.ttfts_ms), 1),
        expected=f"sources of {requests} requests follow 1/(1+waiting): {shares}, by chance within 3 sigma",
        problems=findings.as_tuple,
    )
