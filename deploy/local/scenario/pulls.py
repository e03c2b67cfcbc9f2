"""Rows 3, 4, 5 and 10: the owner is busy. A pull, and three cases in which none may happen.

They run under one load on the owner, in the order 3, 5, 10, 4: each leaves what the next one needs.
"""

from __future__ import annotations

from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import (
    Observation,
    ask,
    expect_answered,
    expect_no_transfer,
    expect_pull,
    make_row,
)
from deploy.local.scenario.row import Findings, Row
from deploy.local.scenario.texts import chat, user
from deploy.local.scenario.world import (
    ANSWER_TOKENS,
    DELTA_TOKENS,
    DOCUMENT_TOKENS,
    OWNER,
    SMALL_DOCUMENT_TOKENS,
    World,
)
from sidecar import wire as sidecar_wire

_QUEUE = 4
_LOAD_ANSWER_TOKENS = 15_000  # reserved at admission: a full batch needs nearly the whole device tier
_WORTHWHILE = 0.5  # TTFT of the pull against recomputing; about 0.15 on an idle machine


async def owner_busy(world: World) -> list[Row]:
    """Rows 3, 5, 10 and 4."""
    async with busy(world.fleet, OWNER, waiting=_QUEUE, answer_tokens=_LOAD_ANSWER_TOKENS):
        pulled, pulled_findings = await _pulled(world)
        below = await _below_delta(world, holder=pulled.decision.destination)
        await world.fleet.set_thresholds(enabled=False, min_cached_token_delta=DELTA_TOKENS)
        forged = await _client_header(world)
        await world.forget(world.others)
        recomputed = await _switched_off(world)
        await world.fleet.set_thresholds(enabled=True, min_cached_token_delta=DELTA_TOKENS)
    if world.judge_ttft:
        share = pulled.answer.ttft_ms / world.recompute_ttft_ms
        pulled_findings.between("TTFT against row 4", round(share, 3), 0.0, _WORTHWHILE)
    expected = "another endpoint is chosen and pulls the prefix; TTFT far below row 4"
    third = world.finish(make_row(3, "owner busy", pulled, expected, pulled_findings))
    return [third, below, forged, recomputed]


async def own_small_document(world: World) -> None:
    """Let the owner, still idle, hold a second document that nobody else has."""
    headers = {LAB_SUBSET_HEADER: world.fleet.engine_spec(OWNER).address.serving}
    before = (await world.fleet.picker.endpoints())[OWNER].blocks_cpu
    body = world.body("What is this?", small=True)
    await ask(world.fleet, body, "own-small", client=world.fleet.lab, headers=headers)
    await world.until_known(OWNER, before * world.block_size + SMALL_DOCUMENT_TOKENS)


async def _pulled(world: World) -> tuple[Observation, Findings]:
    """Row 3; its verdict waits for row 4."""
    findings = Findings()
    seen = await ask(world.fleet, world.body("How many containers were there?"), "row-03")
    findings.one_of("destination", seen.decision.destination, world.others)
    expect_pull(findings, seen, OWNER, world.fleet.spec.kv_bytes_per_token)
    findings.true(
        seen.computed.pulled_tokens >= DOCUMENT_TOKENS - world.block_size,
        "less than the document was pulled",
    )
    expect_answered(findings, seen)
    await world.until_known(seen.decision.destination, seen.computed.pulled_tokens)
    return seen, findings


async def _below_delta(world: World, *, holder: str) -> Row:
    """Row 5: the owner holds the whole conversation, the destination all but its last short turns."""
    findings = Findings()
    messages = [*world.conversation, user("And whom did they tell?")]
    seen = await ask(world.fleet, chat(messages, max_tokens=ANSWER_TOKENS), "row-05")
    findings.equal("destination", seen.decision.destination, holder)
    findings.equal("reason", seen.decision.reason, "below_delta")
    gain_tokens = max((tokens for _, tokens, _ in seen.decision.band), default=0)
    gain_tokens -= seen.decision.computing_cached_tokens
    findings.between("gain of the owner in tokens", gain_tokens, 1, DELTA_TOKENS - 1)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    expected = f"the owner holds {gain_tokens} tokens more, the minimum is {DELTA_TOKENS}: no source"
    return world.finish(make_row(5, "gain below minimum", seen, expected, findings))


async def _switched_off(world: World) -> Row:
    """Row 4: as row 3, with pulls switched off in the thresholds file."""
    findings = Findings()
    seen = await ask(world.fleet, world.body("How many containers are left?"), "row-04")
    findings.one_of("destination", seen.decision.destination, world.others)
    findings.equal("reason", seen.decision.reason, "switched_off")
    findings.equal("cached tokens", seen.computed.cached_tokens, 0)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    world.recompute_ttft_ms = seen.answer.ttft_ms
    return world.finish(make_row(4, "pulls switched off", seen, "the same prefix is recomputed", findings))


async def _client_header(world: World) -> Row:
    """Row 10. Pulls are off, so only the client's own header could cause one; the lab listener lets it
    through to the picker. The owner holds the small document and would serve it."""
    findings = Findings()
    dropped_before = await _dropped(world)
    headers = {
        sidecar_wire.KV_CACHE_SOURCE_HOST_PORT: world.fleet.engine_spec(OWNER).address.serving,
    }
    body = world.body("What is it about?", small=True)
    seen = await ask(world.fleet, body, "row-10", client=world.fleet.lab, headers=headers)
    findings.one_of("destination", seen.decision.destination, world.others)
    findings.equal("reason", seen.decision.reason, "switched_off")
    findings.equal("pull reason of the engine", seen.computed.pull_reason, None)
    findings.equal("kv request id of the engine", seen.computed.kv_request_id, None)
    findings.equal("routing headers that the sidecars had to drop", await _dropped(world) - dropped_before, 0)
    expect_no_transfer(findings, seen)
    expect_answered(findings, seen)
    expected = "x-kv-cache-source-host-port of a client is removed by the picker: nothing is pulled"
    return world.finish(make_row(10, "client names a source", seen, expected, findings))


async def _dropped(world: World) -> int:
    return sum([await world.fleet.sidecar(pod).routing_headers_dropped() for pod in world.fleet.spec.pods])
