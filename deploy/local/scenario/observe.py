"""Asks one question through the gateway and collects what every part says about it.

The answer comes from the client's side, the decision from the picker, the tokens from the engine that
computed the prompt, and the bytes from both ends of every transfer: four independent accounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.local.client import CHAT, Answer, GatewayClient
from deploy.local.fleet import Fleet
from deploy.local.handles import Decision, EngineCounters, RequestAccount
from deploy.local.scenario.row import Findings, Row
from deploy.local.waiting import until

_ACCOUNTS_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that moved between two readings, by engine, counted at either end."""

    received: Mapping[str, int]
    served: Mapping[str, int]

    @property
    def received_bytes(self) -> int:
        return sum(self.received.values())

    @property
    def served_bytes(self) -> int:
        return sum(self.served.values())


@dataclass(frozen=True, slots=True)
class Observation:
    """One request, as the client, the picker, the engines and the counters saw it."""

    answer: Answer
    decision: Decision
    computed: RequestAccount  # by the endpoint that computed the prompt
    decoded: RequestAccount  # by the destination; the same account when it computed the prompt itself
    moved: Transfer


class Meter:
    """Reads the transfer counters of some engines before and after."""

    def __init__(self, fleet: Fleet, pods: Sequence[str]) -> None:
        self._fleet = fleet
        self._pods = pods
        self._before: dict[str, EngineCounters] = {}

    async def start(self) -> None:
        self._before = await self._read()

    async def stop(self) -> Transfer:
        """What moved since `start`. The two ends may count a moment apart, so wait until they agree;
        if they never do, the difference is the caller's finding."""
        moved = await self._moved()
        for _ in range(100):
            if moved.received_bytes == moved.served_bytes:
                break
            moved = await self._moved()
        return moved

    async def _moved(self) -> Transfer:
        now = await self._read()
        return Transfer(
            {pod: now[pod].received_bytes - self._before[pod].received_bytes for pod in self._pods},
            {pod: now[pod].served_bytes - self._before[pod].served_bytes for pod in self._pods},
        )

    async def _read(self) -> dict[str, EngineCounters]:
        return {pod: await self._fleet.engine(pod).counters() for pod in self._pods}


async def ask(
    fleet: Fleet,
    body: Mapping[str, Any],
    request_id: str,
    *,
    client: GatewayClient | None = None,
    headers: Mapping[str, str] | None = None,
) -> Observation:
    """Send a chat completion and wait until every part has accounted for it."""
    meter = Meter(fleet, fleet.spec.pods)
    await meter.start()
    answer = await (client or fleet.gateway).stream(CHAT, body, request_id=request_id, headers=headers)
    moved = await meter.stop()
    decision = await decision_of(fleet, request_id)
    decoded = await account_of(fleet, decision.destination, request_id)
    computed = decoded
    if decision.prefill is not None:
        computed = await account_of(fleet, decision.prefill, request_id)
    return Observation(answer, decision, computed, decoded, moved)


async def decision_of(fleet: Fleet, request_id: str) -> Decision:
    found = await until(
        f"the picker has a record of {request_id}",
        lambda: fleet.picker.decision(request_id),
        lambda decision: decision is not None,
        timeout_s=_ACCOUNTS_SETTLE_S,
    )
    assert found is not None
    return found


async def account_of(fleet: Fleet, pod: str, request_id: str) -> RequestAccount:
    found = await until(
        f"{pod} has an account of {request_id}",
        lambda: fleet.engine(pod).account(request_id),
        lambda account: account is not None,
        timeout_s=_ACCOUNTS_SETTLE_S,
    )
    assert found is not None
    return found


def make_row(number: int, title: str, seen: Observation, expected: str, findings: Findings) -> Row:
    """The row that an observation makes, verdict included."""
    return Row(
        number=number,
        title=title,
        destination=seen.decision.destination,
        prefill=seen.decision.prefill or "",
        source=seen.decision.source or "",
        reason=seen.decision.reason,
        prompt_tokens=seen.answer.prompt_tokens,
        cached_tokens=seen.computed.cached_tokens,
        pulled_tokens=seen.computed.pulled_tokens,
        bytes_received=seen.moved.received_bytes,
        bytes_served=seen.moved.served_bytes,
        ttft_ms=round(seen.answer.ttft_ms, 1),
        expected=expected,
        problems=findings.as_tuple,
    )


def expect_no_transfer(findings: Findings, seen: Observation) -> None:
    """No source named, nothing pulled, not one byte moved."""
    findings.equal("source", seen.decision.source, None)
    findings.equal("pulled tokens", seen.computed.pulled_tokens, 0)
    findings.equal("bytes received", seen.moved.received_bytes, 0)
    findings.equal("bytes served", seen.moved.served_bytes, 0)


def expect_pull(findings: Findings, seen: Observation, source: str, kv_bytes_per_token: int) -> None:
    """Pulled from `source` exactly what the picker promised, counted alike at both ends."""
    findings.equal("reason", seen.decision.reason, "pull")
    findings.equal("source", seen.decision.source, source)
    findings.equal("pulled tokens", seen.computed.pulled_tokens, seen.decision.gain_tokens)
    findings.equal("corrupt blocks", seen.computed.corrupt_blocks, 0)
    pulled_bytes = seen.computed.pulled_tokens * kv_bytes_per_token
    findings.true(pulled_bytes > 0, "nothing was pulled")
    findings.equal("bytes received by the destination", seen.moved.received_bytes, pulled_bytes)
    findings.equal("bytes served by the source", seen.moved.served.get(source), pulled_bytes)


def expect_answered(findings: Findings, seen: Observation) -> None:
    """Tokens add up: what was not cached was computed, and client and engine count alike."""
    account = seen.computed
    findings.equal("computed tokens", account.computed_tokens, account.prompt_tokens - account.cached_tokens)
    findings.equal("prompt tokens of the answer", seen.answer.prompt_tokens, account.prompt_tokens)
    findings.true(bool(seen.answer.text), "the answer is empty")
