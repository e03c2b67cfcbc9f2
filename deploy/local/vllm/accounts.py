"""What a real engine says of one request: the difference of its counters before and after.

vLLM has no page for a single request, so an account is exact only where nothing else is prefilled on that
engine meanwhile. The rows see to that: the one who computes a prompt is never the one under load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from deploy.local.client import CHAT, GatewayClient
from deploy.local.fleet import Fleet
from deploy.local.handles import RequestAccount
from deploy.local.scenario.observe import Observation, Transfer, decision_of
from deploy.local.waiting import until
from engine_plugin import wire

_PROMPT: Final = "vllm:prompt_tokens_total"
_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
UP: Final = "kvpull_up"
_SETTLE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Page:
    """The counters of one engine at one moment, summed over the labels that do not matter here."""

    totals: Counter[str]
    cached: Counter[str]  # by source
    pulls: Counter[str]  # by reason

    @classmethod
    def read(cls, text: str) -> Page:
        totals: Counter[str] = Counter()
        cached: Counter[str] = Counter()
        pulls: Counter[str] = Counter()
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            totals[sample.name] += int(sample.value)
            if sample.name == _CACHED:
                cached[sample.labels["source"]] += int(sample.value)
            elif sample.name == wire.PULLS_TOTAL:
                pulls[sample.labels["reason"]] += int(sample.value)
        return cls(totals, cached, pulls)


async def pages(fleet: Fleet) -> dict[str, Page]:
    """Of every engine."""
    return {pod: await page(fleet, pod) for pod in fleet.spec.pods}


async def page(fleet: Fleet, pod: str) -> Page:
    """Of one engine; empty while it serves none."""
    return Page.read(await fleet.page(f"{fleet.engine(pod).url}/metrics") or "")


async def wait_up(fleet: Fleet) -> None:
    """Until every engine can pull and serve."""
    await until(
        "every engine's transport is up",
        lambda: pages(fleet),
        lambda seen: all(page.totals[UP] == 1 for page in seen.values()),
        timeout_s=_SETTLE_S,
    )


async def ask(
    fleet: Fleet,
    body: Mapping[str, Any],
    request_id: str,
    *,
    client: GatewayClient | None = None,
    headers: Mapping[str, str] | None = None,
    path: str = CHAT,
) -> Observation:
    """As `scenario.observe.ask`. An idle source tells its figures within a second, so both ends are waited
    for until they agree."""
    before = await pages(fleet)
    answer = await (client or fleet.gateway).stream(path, body, request_id=request_id, headers=headers)
    decision = await decision_of(fleet, request_id)
    legs = {decision.prefill or decision.destination, decision.destination}
    after = await until(
        f"both ends of {request_id} count alike, and {' and '.join(sorted(legs))} the prompt",
        lambda: pages(fleet),
        lambda now: (
            transfer(before, now).received_bytes == transfer(before, now).served_bytes
            and all(_prompt_tokens(before[pod], now[pod]) >= answer.prompt_tokens for pod in legs)
        ),
        timeout_s=_SETTLE_S,
    )
    moved = transfer(before, after)
    pod = decision.destination
    decoded = account(before[pod], after[pod], moved.received[pod])
    if decision.prefill is None:
        return Observation(answer, decision, decoded, decoded, moved)
    handed_over = replace(
        decoded,
        pulled_tokens=0,
        pulled_bytes=0,
        handed_over_tokens=decoded.pulled_tokens,
        handed_over_bytes=decoded.pulled_bytes,
    )
    pod = decision.prefill
    computed = account(before[pod], after[pod], moved.received[pod])
    return Observation(answer, decision, computed, handed_over, moved)


def _prompt_tokens(before: Page, after: Page) -> int:
    return after.totals[_PROMPT] - before.totals[_PROMPT]


def transfer(before: Mapping[str, Page], after: Mapping[str, Page]) -> Transfer:
    """What moved between two readings of these engines."""

    def gained(name: str) -> dict[str, int]:
        return {pod: after[pod].totals[name] - before[pod].totals[name] for pod in before}

    return Transfer(gained(wire.PULL_RECEIVED_BYTES_TOTAL), gained(wire.PULL_SERVED_BYTES_TOTAL))


def account(before: Page, after: Page, received_bytes: int) -> RequestAccount:
    """Of one engine, on which nothing else was prefilled between the two readings."""
    cached, pulls = after.cached - before.cached, after.pulls - before.pulls
    prompt_tokens = _prompt_tokens(before, after)
    return RequestAccount(
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens - cached.total(),
        device_hit_tokens=cached["device"],
        restored_tokens=cached["host"],
        pulled_tokens=cached["p2p"],
        pulled_bytes=received_bytes,
        handed_over_tokens=0,
        handed_over_bytes=0,
        cached_tokens=cached.total(),
        corrupt_blocks=pulls["checksum"],
        pull_reason=next(iter(pulls), None),
        pull_detail="",
        kv_request_id=None,
    )
